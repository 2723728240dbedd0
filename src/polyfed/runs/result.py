"""The result of a run: scores on seen and unseen domains, costs, and trained models."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.evaluation import Row
from polyfed.core.privacy import account_of
from polyfed.errors import DataError, SettingError, nearest
from polyfed.runs.folder.checkpoint import joint_digest
from polyfed.runs.folder.final_files import Answers
from polyfed.runs.scores import BASELINE, LAST, WINDOW, ByRound, LastRounds, domains_of, headline_by_scores, warnings
from polyfed.runs.training_settings import describe_training
from polyfed.tasks.known import pooled, value_by
from polyfed.tasks.metrics import MEASURES, SMALLER_IS_BETTER, over_examples, standard_error
from polyfed.tasks.task import Prediction

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


class Result:
    """A finished run.

    Attributes:
        accuracy: ``{"seen": {domain: x}, "unseen": {domain: x}, "mean": x, "worst": x, "spread": x}``, fractions between 0 and 1.
        rows: All scores of the last evaluation.
        answers: Maps (view, client, domain) to label, prediction and confidence for each test image, if they are on this machine.
        classes: Names of the classes.
        headline: Primary metric, and the reason for its choice (``--metric``).
        last_rounds: Primary metric after each of the last scored rounds, with mean and deviation; None if only one was scored.
        warnings: Warnings if the run was opened without its final state, if a model is no better than always predicting the most frequent class, or if the last round is an outlier.
    """

    def __init__(
        self,
        experiment: Experiment,
        rows: Sequence[Row],
        path: str | None = None,
        answers: Answers | None = None,
        by_round: ByRound | None = None,
    ) -> None:
        self.experiment = experiment
        self.answers = answers or {}
        self.rows = list(rows)
        self.path = path
        self.accuracy = accuracy_table(self.rows)
        self.classes = experiment.federation.classes
        self.domains = domains_of(self.rows)
        self.headline = experiment.headline or headline_by_scores(experiment.settings.metric, self.domains)
        self.last_rounds = self._last_rounds(by_round or {})
        self.warnings = [*filter(None, [experiment.unfinished]), *warnings(self.domains, str(experiment.method))]
        if self.outlier:
            self.warnings.append(f"{experiment.method}: {self.outlier}")

    @property
    def outlier(self) -> str:
        """A warning if the run ends with a last round that is not typical, otherwise empty."""
        return self.last_rounds.warning if self.last_rounds and self.experiment.settings.selection == LAST else ""

    def _last_rounds(self, by_round: ByRound) -> LastRounds | None:
        """Return the primary metric after each averaged round, or after each of the last scored rounds; None if only one was scored."""
        averaged = self.experiment.settings.averaged_rounds
        first = self.experiment.server.round - averaged if averaged else 0
        chosen = sorted(number for number in by_round if number > first)[-(averaged or WINDOW) :]
        values = {number: float(accuracy_table(by_round[number], self.headline.measure)["mean"]) for number in chosen}
        return LastRounds(values) if len(values) > 1 else None

    def table(self, measure: str = "accuracy") -> dict[str, Any]:
        """Return any metric in the form of ``accuracy``: ``balanced_accuracy``, ``macro_f1``, ``auroc``, ``calibration_error``..."""
        if measure not in MEASURES:
            raise SettingError(f"Unknown metric {measure!r}. {nearest(measure, MEASURES)}")
        return accuracy_table(self.rows, measure)

    @property
    def words(self) -> str:
        """A short summary of the scores."""
        validation = [value_by(self.headline.measure, row.numbers, row.client) for row in self.rows if row.view == "validation"]
        if validation:
            return f"validation {100 * statistics.fmean(validation):.1f} %"
        found = self.table(self.headline.measure)
        view = "seen" if found["seen"] else "unseen"
        domains = found[view]
        where = f"{view} {next(iter(domains))}" if len(domains) == 1 else f"mean of {len(domains)} {view} domains"
        others = "".join(f", unseen {name} {100 * value:.1f} %" for name, value in found["unseen"].items() if view == "seen")
        return f"{self.headline.words}: {where} {100 * found['mean']:.1f} %{others}" if domains else "nothing was scored"

    def model_for(self, client: str) -> nn.Module:
        """Return a copy of the model of a seen client, in eval mode."""
        from polyfed.runs.predict import list_clients

        known = self.experiment.backend.data
        if client not in known:
            raise DataError(f"Unknown client {client!r}. {list_clients(known)}")
        server, bench = self.experiment.server, self.experiment.bench
        prepared = Client(known[client], bench, self.experiment.backend.state_of(client), server.round)
        prepared.receive(server.outgoing(client))
        return copy.deepcopy(bench.model).to("cpu").eval()

    def newcomer(self) -> nn.Module:
        """Return a copy of the model for a new client, in eval mode, with local layers averaged."""
        bench = self.experiment.bench
        state = self.experiment.newcomer_state()
        bench.load({name: value for name, value in state.items() if name in bench.live})
        return copy.deepcopy(bench.model).to("cpu").eval()

    def predict(self, images: Any, client: str | None = None, domain: str | None = None) -> list[Prediction]:
        """Predict images: the class with all probabilities, or the equivalent of the task (labels, numbers, a mask).

        Args:
            images: uint8 array (n, channels, height, width) or (n, height, width, channels), or a list of files or PIL images. They are
                cropped and resized in the same way as the images of the run.
            client: Client whose model predicts. Default: the newcomer model.
            domain: Domain of images with more than 8 bits, if the domains of the run scale them differently. Default: that of the client.
        """
        from polyfed.runs.predict import ImageInputs, predicted

        federation = self.experiment.federation
        tensor = ImageInputs.of(federation, domain, client).tensor(images)
        return [federation.task.answer(row, self.classes) for row in predicted(self.experiment, tensor, client)]

    def plot(self) -> Any:
        """Draw the primary metric per domain with matplotlib; for accuracy, with the baseline of the most frequent class."""
        from polyfed.runs.figures import dots_figure

        measure = self.headline.measure
        names = {key: f"unseen {key[1]}" if key[0] == "unseen" else key[1] for key in self.domains}
        dots = [(float(numbers.get(measure, math.nan)), standard_error(numbers, measure)) for numbers in self.domains.values()]
        rates = [float(one.get("majority_rate", math.nan)) for one in self.domains.values()] if measure == "accuracy" else []
        return dots_figure(list(names.values()), [(str(self.experiment.method), dots)], self.headline.words, rates)

    @property
    def digest(self) -> str:
        """One hash of the final state of server and clients."""
        return joint_digest(self.experiment.snapshot(), self.experiment.backend.client_digests())

    def summary(self) -> dict[str, Any]:
        """Return the result for JSON."""
        costs = self.experiment.costs
        return {
            **({"warning": " ".join(self.warnings)} if self.warnings else {}),
            "method": str(self.experiment.method),
            "data": self.experiment.settings.data,
            "seed": self.experiment.settings.seed,
            "rounds": self.experiment.server.round,
            "training": describe_training(self.experiment.settings, self.experiment.origins),
            "metric": self.headline.measure,
            "metric_reason": self.headline.reason,
            "headline": self.table(self.headline.measure),
            "accuracy": self.accuracy,
            **(
                {}
                if self.last_rounds is None
                else {"last_rounds": self.last_rounds.as_json() | ({"warning": self.outlier} if self.outlier else {})}
            ),
            "majority_rate": {
                view: values for view, values in accuracy_table(self.rows, "majority_rate").items() if view in ("seen", "unseen")
            },
            "test_sizes": self.experiment.test_sizes(),
            "scored_clients": self.experiment.scored_sample(),
            **({} if (account := account_of(self.experiment.server)) is None else {"privacy": account}),
            "scores": [{"view": r.view, "client": r.client, "domain": r.domain, **r.numbers} for r in self.rows],
            "bytes_up": costs.total("up"),
            "bytes_down": costs.total("down"),
            "bytes": costs.bytes,
            "messages": costs.messages,
            "seconds": costs.seconds.get("training", 0.0),
            "seconds_by": costs.seconds,
            "digest": self.digest,
            "run": self.path,
        }

    def __repr__(self) -> str:
        table, by_chance = self.table(self.headline.measure), accuracy_table(self.rows, "majority_rate")
        shown = [
            f"{'unseen ' if view == 'unseen' else ''}{domain} {value:.3f} ({BASELINE} {by_chance[view][domain]:.3f})"
            for view in ("seen", "unseen")
            for domain, value in table[view].items()
        ]
        return "\n".join([*self.warnings, f"<Result of {self.experiment.method}, {self.headline.words}: {'; '.join(shown)}>"])

    def _repr_html_(self) -> str:
        measures = list(dict.fromkeys([self.headline.measure, "accuracy", "majority_rate"]))
        tables = {measure: accuracy_table(self.rows, measure) for measure in measures}
        titles = "".join(f"<th>{escape(MEASURES.get(measure, BASELINE))}</th>" for measure in measures)
        cells = "".join(
            f"<tr><td>{view}</td><td>{escape(domain)}</td>"
            + "".join(f"<td>{tables[measure][view][domain]:.3f}</td>" for measure in measures)
            + "</tr>"
            for view in ("seen", "unseen")
            for domain in self.accuracy[view]
        )
        warned = "".join(f"<p><b>{escape(text)}</b></p>" for text in self.warnings)
        caption = f"<caption>{escape(str(self.experiment.method))}</caption>"
        return f"{warned}<table>{caption}<tr><th>view</th><th>domain</th>{titles}</tr>{cells}</table>"


def accuracy_table(rows: Sequence[Row], measure: str = "accuracy") -> dict[str, Any]:
    """Return a metric per view and domain, with clients weighted by test size, and mean, worst and spread over domains.

    These are over seen domains, or over unseen domains if only those were scored.
    """
    by: dict[str, dict[str, list[Mapping[str, Any]]]] = {"seen": {}, "unseen": {}}
    for row in rows:
        if row.view in by:
            by[row.view].setdefault(row.domain, []).append(row.numbers)
    table: dict[str, Any] = {
        view: {domain: measured(many, measure) for domain, many in found.items()} for view, found in by.items()
    }
    values = list((table["seen"] or table["unseen"]).values())
    return table | dict(zip(("mean", "worst", "spread"), over_domains(values, measure), strict=True))


def over_domains(values: Sequence[float], measure: str) -> tuple[float, float, float]:
    """Return mean, worst and spread over domains; NaN if a domain has no value, or there are no domains."""
    if not values or any(map(math.isnan, values)):
        return math.nan, math.nan, math.nan
    worst = max(values) if measure in SMALLER_IS_BETTER else min(values)
    return sum(values) / len(values), worst, max(values) - min(values)


def measured(many: Sequence[Mapping[str, Any]], measure: str) -> float:
    """Return a metric of one domain over all clients tested on it; NaN if a client has none."""
    if measure == "accuracy" and all(measure in numbers for numbers in many):
        return over_examples(many, measure)
    return float(pooled(many).get(measure, math.nan))
