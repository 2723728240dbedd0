"""The kinds of analyses: what each measures of one run, and how it is presented for all runs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.studies.analyse import presentations
from polyfed.studies.analyse.confidence import confidence
from polyfed.studies.analyse.feature_similarity import feature_similarity
from polyfed.studies.analyse.opened_run import OpenedRun
from polyfed.studies.analyse.presentations import Presented, Rows
from polyfed.studies.analyse.rounds import noted, statistics_drift
from polyfed.studies.analyse.tsne import tsne


@dataclass(frozen=True)
class Analysis:
    """One kind of analysis of some runs.

    Attributes:
        kind: its name.
        title: a few words for the head of a section.
        sentence: what was found, with numbers.
        tables: every number, by the name of the table; each row one flat mapping.
        figures: matplotlib figures by name.
        numbers: the few numbers that sum it up, by name and then by the label of the run.
    """

    kind: str
    title: str
    sentence: str
    tables: Mapping[str, Rows]
    figures: Mapping[str, Any] = field(repr=False)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything but the pictures."""
        return {
            "kind": self.kind,
            "title": self.title,
            "sentence": self.sentence,
            "numbers": {name: dict(by_run) for name, by_run in self.numbers.items()},
            "tables": dict(self.tables),
        }

    def _repr_html_(self) -> str:
        from html import escape

        from polyfed.runs.figures import as_image

        shown = "".join(as_image(figure, 90, f"{self.title}: {name}") for name, figure in self.figures.items())
        return f"<b>{escape(self.title)}</b><p>{escape(self.sentence)}</p>{shown}"


@dataclass(frozen=True)
class Kind:
    """A kind of analysis.

    Attributes:
        title: a few words.
        what: one sentence of what it shows, and after which figure.
        measure: the numbers of one run; an error says why it does not apply.
        presented: what is said of all runs that were measured, by their labels.
        needs_data: whether it looks at the run's images; the others read the folder only.
    """

    title: str
    what: str
    measure: Callable[[OpenedRun], Any]
    presented: Callable[[Mapping[str, Any]], Presented]
    needs_data: bool = True

    def present(self, name: str, found: Mapping[str, Any]) -> Analysis:
        """The analysis of the runs that were measured."""
        return Analysis(name, self.title, *self.presented(found))


KINDS: Mapping[str, Kind] = {
    "norm-statistics": Kind(
        "Batch-norm statistics of clients",
        "Statistics of each client and layer, and how far they lie apart (FedWon Figures 1b and 12).",
        presentations.measure_statistics,
        presentations.present_statistics,
    ),
    "norm-drift": Kind(
        "Drift of batch-norm statistics",
        "How the statistics of server and clients move from round to round (FixBN Figure 2).",
        lambda run: statistics_drift(run.lines),
        presentations.present_drift,
        needs_data=False,
    ),
    "features": Kind(
        "Feature maps",
        "Feature maps of clients' models and the server's on the same images, and their cosine similarity (FedWon Figure 5).",
        lambda run: feature_similarity(run.experiment, states=run.trained),
        presentations.present_features,
    ),
    "model-spread": Kind(
        "Differences between clients' models",
        "Standard deviation across clients' models, layer by layer (hFedF Figure 5).",
        presentations.measure_spread,
        presentations.present_spread,
    ),
    "alignment": Kind(
        "Weights and embeddings of clients",
        "Alignment weights and embeddings of clients over rounds (hFedF Figures 4, 6 and 7).",
        lambda run: noted(run.lines),
        presentations.present_noted,
        needs_data=False,
    ),
    "confidence": Kind(
        "Confidence of right and wrong answers",
        "How sure the model is of right and wrong answers, on seen and unseen domains (hFedF Figure 3).",
        lambda run: confidence(run.answers),
        presentations.present_confidence,
        needs_data=False,
    ),
    "tsne": Kind(
        "Features by class and by domain",
        "t-SNE of the features of test images, by class and by domain (gPerXAN Figure 3).",
        lambda run: tsne(run.experiment),
        presentations.present_map,
    ),
    "grid": Kind(
        "One method against another over a grid",
        "Accuracy of one method minus that of another over a grid of settings (FixBN Figure D).",
        OpenedRun.on_grid,
        presentations.present_grid,
        needs_data=False,
    ),
    "gradient-bias": Kind(
        "Bias of local gradients",
        "How far local gradients are from the central one under the run's norm (FixBN sections 3.2 and 3.5).",
        presentations.measure_bias,
        presentations.present_bias,
    ),
    "union-statistics": Kind(
        "Statistics of the union",
        "Accuracy with batch-norm statistics of all data together instead of averaged ones (FixBN section 3.4).",
        presentations.measure_union,
        presentations.present_union,
    ),
}
