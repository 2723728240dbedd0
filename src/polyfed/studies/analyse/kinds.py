"""Register the analyses: how each measures one run and presents all runs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.studies.analyse import presentations
from polyfed.studies.analyse.confidence import confidence
from polyfed.studies.analyse.features import feature_similarity, tsne
from polyfed.studies.analyse.opened_run import OpenedRun
from polyfed.studies.analyse.presentations import Presentation, Rows
from polyfed.studies.analyse.rounds import noted, statistics_drift


@dataclass(frozen=True)
class Analysis:
    """The outcome of one analysis over a set of runs.

    Attributes:
        kind: Name of the analysis.
        title: Section title.
        sentence: Summary of the outcome, with numbers.
        tables: All numbers by table name; each row is a flat mapping.
        figures: Matplotlib figures by name.
        numbers: Headline numbers by name, then by run label.
    """

    kind: str
    title: str
    sentence: str
    tables: Mapping[str, Rows]
    figures: Mapping[str, Any] = field(repr=False)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return everything except the figures."""
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
    """An analysis that polyfed offers.

    ``measure`` measures one run, or raises an error if the analysis does not apply to it; ``summarise`` presents all measured runs by
    label. Analyses without ``needs_data`` only read the run folder.
    """

    title: str
    what: str
    measure: Callable[[OpenedRun], Any]
    summarise: Callable[[Mapping[str, Any]], Presentation]
    needs_data: bool = True

    def present(self, name: str, found: Mapping[str, Any]) -> Analysis:
        return Analysis(name, self.title, *self.summarise(found))


KINDS: Mapping[str, Kind] = {
    "norm-statistics": Kind(
        "Batch-norm statistics of clients",
        "Statistics per client and layer, and the distances between clients (FedWon Figures 1b and 12).",
        presentations.measure_statistics,
        presentations.present_statistics,
    ),
    "norm-drift": Kind(
        "Drift of batch-norm statistics",
        "Change of the server's and the clients' statistics over rounds (FixBN Figure 2).",
        lambda run: statistics_drift(run.lines),
        presentations.present_drift,
        needs_data=False,
    ),
    "features": Kind(
        "Feature maps",
        "Feature maps of the client and server models on the same images, and their cosine similarity (FedWon Figure 5).",
        lambda run: feature_similarity(run.experiment, states=run.trained),
        presentations.present_features,
    ),
    "model-spread": Kind(
        "Differences between client models",
        "Standard deviation across client models, per layer (hFedF Figure 5).",
        presentations.measure_spread,
        presentations.present_spread,
    ),
    "alignment": Kind(
        "Client weights and embeddings",
        "Alignment weights and client embeddings over rounds (hFedF Figures 4, 6 and 7).",
        lambda run: noted(run.lines),
        presentations.present_noted,
        needs_data=False,
    ),
    "confidence": Kind(
        "Confidence in right and wrong predictions",
        "Confidence of the model in right and in wrong predictions, on seen and unseen domains (hFedF Figure 3).",
        lambda run: confidence(run.answers),
        presentations.present_confidence,
        needs_data=False,
    ),
    "tsne": Kind(
        "Features by class and by domain",
        "t-SNE of test-image features, by class and by domain (gPerXAN Figure 3).",
        lambda run: tsne(run.experiment),
        presentations.present_map,
    ),
    "grid": Kind(
        "Two methods compared over a grid",
        "Accuracy difference between two methods over a grid of settings (FixBN Figure D).",
        OpenedRun.grid_cell,
        presentations.present_grid,
        needs_data=False,
    ),
    "gradient-bias": Kind(
        "Bias of local gradients",
        "Distance of local gradients from the central gradient under the run's norm (FixBN sections 3.2 and 3.5).",
        presentations.measure_bias,
        presentations.present_bias,
    ),
    "union-statistics": Kind(
        "Statistics of the pooled data",
        "Accuracy with batch-norm statistics of the pooled data instead of averaged ones (FixBN section 3.4).",
        presentations.measure_union,
        presentations.present_union,
    ),
}
