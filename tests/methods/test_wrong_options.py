"""Options that make no sense are refused, with a sentence that names them."""

from __future__ import annotations

import pytest

from polyfed.core.method import parse
from polyfed.errors import OptionError


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fedgma(tau=1.5)", "tau lies between"),
        ("fedgma(server_lr=-1.0)", "server_lr must not"),
        ('fedgma(variant="masked")', "masked_delta"),
        ("feddg_ga(step=2.0)", "step lies between"),
        ('feddg_ga(metric="auc")', "metric cannot be"),
        ("rsc(features=1.0)", "features lies between"),
        ("mixstyle(p=1.5)", "p lies between"),
        ("mixstyle(alpha=0.0)", "alpha must be positive"),
        ("mixstyle(after=())", "after takes auto"),
        ("ibn(where=())", "where takes all"),
        ("fedsr(samples=0)", "samples at least 1"),
        ('ccst(style="vgg")', "ccst"),
        ('ccst(mode="both")', "ccst"),
        ("ccst(copies=-1)", "ccst"),
        ("ccst(alpha=1.5)", "ccst"),
        ("elcfs(low=0.5)", "elcfs"),
        ("elcfs(share=0.0)", "elcfs"),
        ("elcfs(clip=0.0)", "elcfs"),
        ("copa(weight=-1.0)", "copa"),
        ('copa(norm="group")', "copa"),
        ("fedavgm(momentum=1.0)", "fedavgm"),
        ("fedadam(lr=0.0)", "fedadam"),
        ("fedyogi(beta1=1.0)", "fedyogi"),
        ("fedadagrad(tau=0.0)", "fedadagrad"),
        ("scaffold(server_lr=-1.0)", "scaffold"),
        ("trimmed_mean(share=0.5)", "trimmed_mean"),
        ("krum(keep=0)", "krum"),
        ("quantise(bits=3)", "quantise"),
        ("topk(share=0.0)", "topk"),
    ],
)
def test_wrong_options_are_refused(text: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        parse(text)
