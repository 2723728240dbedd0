"""Tasks: which targets they take, their measures against scikit-learn, sums that add up over clients, and whole runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn

import polyfed
from polyfed.core.data_types import ArrayExamples
from polyfed.errors import DataError, NotFinite, SettingError
from polyfed.settings import AUTO, FACTS
from polyfed.tasks.known import CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION, TASKS, infer_task, pooled, task_of_record
from polyfed.tasks.losses import losses, task_loss
from polyfed.tasks.metrics import MEASURES
from polyfed.tasks.segmentation import IGNORED
from polyfed.tasks.task import Task

OTHERS = (MULTILABEL, REGRESSION, SEGMENTATION)


def random_batch(task: Task, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs of a model with three classes, and targets."""
    draw = torch.Generator().manual_seed(seed)
    if task is SEGMENTATION:
        masks = torch.randint(0, 4, (count, 5, 6), generator=draw)
        masks[masks == 3] = IGNORED
        return torch.randn(count, 3, 5, 6, generator=draw), masks.to(torch.uint8)
    outputs = torch.randn(count, 3, generator=draw)
    if task is MULTILABEL:
        return outputs, torch.rand(count, 3, generator=draw) < 0.4
    if task is REGRESSION:
        return outputs, outputs + torch.randn(count, 3, generator=draw)
    return outputs, torch.randint(0, 3, (count,), generator=draw)


def results(task: Task, outputs: Tensor, targets: Tensor, in_detail: bool = False) -> dict[str, Any]:
    scores = task.scores(3, in_detail)
    for rows in torch.arange(len(targets)).split(7):
        scores.add(task.predicted(outputs[rows]), targets[rows])
    return scores.results()


# ---------------------------------------------------------------------------------------------------------- declarations
def test_settings_name_all_tasks_and_only_measures_that_some_task_has() -> None:
    assert FACTS["task"].choices == (AUTO, *sorted(TASKS))
    measures = {name for task in TASKS.values() for name in task.measures}
    assert measures == set(MEASURES) and set(FACTS["metric"].choices) - {AUTO} <= measures


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_has_a_loss_of_its_own_that_falls_when_outputs_are_right(task: Task) -> None:
    outputs, targets = random_batch(task, 8)
    loss = task_loss(AUTO, task, [8, 8, 8])
    aims = task.for_loss(targets)
    outputs.requires_grad_()
    before = loss(outputs, aims)
    (gradient,) = torch.autograd.grad(before, outputs)
    assert loss(outputs - 0.5 * gradient, aims) < before


def test_a_loss_of_another_task_is_refused() -> None:
    with pytest.raises(SettingError, match=r"cross_entropy supports classification, but the task is regression.*squared_error"):
        task_loss("cross_entropy", REGRESSION, [])
    assert all("tasks" in losses.find(name).extra for name in losses.names())


# ---------------------------------------------------------------------------------------------------------- targets
def test_the_task_is_told_from_the_targets() -> None:
    for targets, task in [
        (torch.tensor([0, 2]), CLASSIFICATION),
        (torch.tensor([0, 2], dtype=torch.uint8), CLASSIFICATION),
        (torch.tensor([[0, 1], [1, 1]]), MULTILABEL),
        (torch.tensor([[True, False]]), MULTILABEL),
        (torch.tensor([[0.0, 1.0]]), MULTILABEL),
        (torch.tensor([0.5, 2.0]), REGRESSION),
        (torch.tensor([[0.5, 2.0]]), REGRESSION),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), SEGMENTATION),
    ]:
        assert infer_task([targets]) is task
        assert not task.problem(targets)


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (torch.tensor([0.0, 1.0, 2.0]), "may be classes or measurements.*y.long.*--task regression"),
        (torch.zeros(2, 3, 4), "no task supports"),
        (torch.tensor([[0, 3]]), "no task supports"),
    ],
)
def test_targets_that_no_task_has_or_several_could_have_are_refused(targets: Tensor, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        infer_task([targets])


def test_targets_of_another_kind_are_refused_with_a_sentence() -> None:
    for task, targets, problem in [
        (CLASSIFICATION, torch.tensor([0.5]), "float32"),
        (CLASSIFICATION, torch.tensor([[1, 0]]), r"shape \(n, 2\)"),
        (CLASSIFICATION, torch.tensor([0, 3]), "label 3, but the 3 classes"),
        (CLASSIFICATION, torch.tensor([0, -1]), "label -1"),
        (MULTILABEL, torch.tensor([[0, 2, 1]]), "value 2"),
        (MULTILABEL, torch.tensor([[0, 1]]), "2 columns, but there are 3 labels"),
        (REGRESSION, torch.tensor([math.nan]), "not finite"),
        (REGRESSION, torch.tensor([[1.0, 2.0]]), "2 columns, but there are 3 outputs"),
        (SEGMENTATION, torch.tensor([0, 1]), r"shape \(n,\)"),
        (SEGMENTATION, torch.full((1, 2, 2), 7), "class 7, but the 3 classes"),
    ]:
        with pytest.raises(DataError, match=f"(?i)Targets of client a .*{problem}.*{task.name} needs"):
            task.check(ArrayExamples(torch.zeros(len(targets), 3, 4, 4), targets), "client a", 3)


# ---------------------------------------------------------------------------------------------------------- measures
def test_multilabel_measures_are_those_of_scikit_learn() -> None:
    outputs, targets = random_batch(MULTILABEL, 40)
    found = results(MULTILABEL, outputs, targets, in_detail=True)
    given = (outputs.sigmoid() >= 0.5).numpy()
    truth = targets.numpy()
    assert found["macro_f1"] == pytest.approx(sklearn.metrics.f1_score(truth, given, average="macro"))
    assert found["micro_f1"] == pytest.approx(sklearn.metrics.f1_score(truth, given, average="micro"))
    assert found["exact_match"] == pytest.approx(sklearn.metrics.accuracy_score(truth, given))
    assert found["accuracy"] == pytest.approx(1 - sklearn.metrics.hamming_loss(truth, given))
    assert found["auroc"] == pytest.approx(sklearn.metrics.roc_auc_score(truth, outputs.sigmoid().numpy(), average="macro"))


def test_regression_measures_are_those_of_scikit_learn() -> None:
    outputs, targets = random_batch(REGRESSION, 40)
    found = results(REGRESSION, outputs, targets)
    assert found["r2"] == pytest.approx(sklearn.metrics.r2_score(targets, outputs))
    assert found["mean_absolute_error"] == pytest.approx(sklearn.metrics.mean_absolute_error(targets, outputs))
    assert found["root_mean_squared_error"] == pytest.approx(sklearn.metrics.mean_squared_error(targets, outputs) ** 0.5)


def test_segmentation_measures_are_those_of_scikit_learn_without_ignored_pixels() -> None:
    outputs, masks = random_batch(SEGMENTATION, 10)
    found = results(SEGMENTATION, outputs, masks, in_detail=True)
    scored = (masks != IGNORED).numpy()
    truth, given = masks.numpy()[scored], outputs.argmax(1).numpy()[scored]
    assert found["mean_iou"] == pytest.approx(sklearn.metrics.jaccard_score(truth, given, average="macro"))
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(truth, given))
    assert found["balanced_accuracy"] == pytest.approx(sklearn.metrics.balanced_accuracy_score(truth, given))
    assert found["pixels"] == scored.sum() and found["count"] == 10
    assert np.array_equal(found["confusion"], sklearn.metrics.confusion_matrix(truth, given))


def test_ignored_pixels_have_no_part_in_the_loss() -> None:
    outputs, masks = random_batch(SEGMENTATION, 3)
    loss, aims = task_loss(AUTO, SEGMENTATION, []), SEGMENTATION.for_loss(masks)
    scored = aims != IGNORED
    by_hand = nn.functional.cross_entropy(outputs.permute(0, 2, 3, 1)[scored], aims[scored])
    assert loss(outputs, aims) == pytest.approx(float(by_hand))
    assert float(loss(outputs, torch.full_like(aims, IGNORED))) == 0


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_scores_of_clients_pool_to_those_of_their_union_and_records_are_recognised(task: Task) -> None:
    outputs, targets = random_batch(task, 30)
    parts = [results(task, outputs[rows], targets[rows]) for rows in (slice(0, 11), slice(11, 30))]
    whole = results(task, outputs, targets)
    assert task_of_record(whole) is task
    together = pooled(parts)
    for name in task.measures:
        if name in whole and not name.startswith(("calibration", "confidence")):
            assert together[name] == pytest.approx(whole[name]), name


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_parts_scored_together_have_the_results_of_each_by_itself(task: Task) -> None:
    outputs, targets = random_batch(task, 30)
    predicted = task.predicted(outputs)
    together = task.results_of_parts(predicted, targets, [11, 19], 3)
    alone = [results(task, outputs[rows], targets[rows]) for rows in (slice(0, 11), slice(11, 30))]
    for found, own in zip(together, alone, strict=True):
        assert found.keys() == own.keys()
        assert all(found[name] == pytest.approx(own[name]) for name in own)


@pytest.mark.parametrize("task", OTHERS, ids=lambda task: task.name)
def test_predictions_that_do_not_fit_are_refused(task: Task) -> None:
    outputs, targets = random_batch(task, 4)
    with pytest.raises(DataError, match="do not match"):
        task.scores(3).add(outputs[:, :2], targets)
    with pytest.raises(NotFinite, match="diverged"):
        task.scores(3).add(outputs * math.nan, targets)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_form_of_records_takes_real_ones_and_refuses_changed_ones(task: Task) -> None:
    outputs, targets = random_batch(task, 12)
    record = results(task, outputs, targets, in_detail=True)
    assert task.problem_with_record(record) == ""
    assert "expected" in task.problem_with_record({**record, task.main_measure: 7.0})
    assert "not declared" in task.problem_with_record({**record, "loss": 0.1})
    assert "missing" in task.problem_with_record({k: v for k, v in record.items() if k != "count"})
    lists = [key for key, value in record.items() if isinstance(value, list) and key != "confusion"]
    assert task.problem_with_record({**record, lists[0]: record[lists[0]][:-1]})
    assert task.problem_with_record(None)


def test_equal_targets_have_no_r2_and_say_so_where_rounds_are_chosen_by_it() -> None:
    scores = REGRESSION.scores(1)
    scores.add(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 3.0]))
    assert "r2" not in scores.results() and scores.main == pytest.approx(-math.sqrt(2.5))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_answer_for_one_example_names_classes(task: Task) -> None:
    outputs, _ = random_batch(task, 1)
    found = task.answer(task.predicted(outputs)[0], ("a", "b", "c"))
    assert set(found.probabilities) == {"a", "b", "c"} and found.label
    assert (found.mask is not None) == (task is SEGMENTATION)


# ---------------------------------------------------------------------------------------------------------- runs
class Linear(nn.Module):
    """One linear layer on flat inputs."""

    def __init__(self, classes: int, inputs: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found


def linear_data(noise: float = 0.0) -> dict[str, Any]:
    """Two domains with one rule: y = 2 a - b + 3."""
    draw = torch.Generator().manual_seed(0)

    def part(count: int, shift: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 3, generator=draw) + shift
        return x, 2 * x[:, 0] - x[:, 1] + 3 + noise * torch.randn(count, generator=draw)

    return {name: (part(40, shift), part(20, shift)) for name, shift in (("a", 0.0), ("b", 1.0))}


def test_regression_finds_the_known_rule() -> None:
    found = polyfed.run(linear_data(), "fedavg", model=Linear(1), rounds=60, local_epochs=2, batch_size=40, lr=0.1, out=None)
    weights = found.newcomer().state_dict()
    assert weights["head.weight"].flatten().tolist() == pytest.approx([2, -1, 0], abs=1e-3)
    assert float(weights["head.bias"]) == pytest.approx(3, abs=1e-3)
    assert found.headline.measure == "r2" and found.table("r2")["worst"] == pytest.approx(1, abs=1e-5)
    assert found.table("mean_absolute_error")["mean"] < 1e-2


@pytest.mark.parametrize("task", ["multilabel", "segmentation"])
def test_a_task_that_the_targets_are_not_for_is_refused(task: str) -> None:
    with pytest.raises(DataError, match=f"(?i)targets of the training part of domain a .*{task} (takes|needs)"):
        polyfed.run(linear_data(), "fedavg", model=Linear(1), rounds=1, task=task, out=None)


def test_a_task_that_a_data_set_is_not_for_is_refused() -> None:
    with pytest.raises(SettingError, match="--task regression does not match digits-mini, a data set for classification"):
        polyfed.run("digits-mini", "fedavg", rounds=1, task="regression", out=None)
    with pytest.raises(SettingError, match=r"--metric mean_iou .* is not a metric of classification"):
        polyfed.run("digits-mini", "fedavg", rounds=1, metric="mean_iou", out=None)


def test_methods_that_need_class_labels_are_refused_elsewhere() -> None:
    for method in ["copa", "fedsr", "rsc", "guiding", "gperxan", 'feddg_ga(metric="accuracy")']:
        assert polyfed.parse(method).facts.class_labels
        with pytest.raises(SettingError, match="needs one class label per example, but the task is regression"):
            image_regression = {"a": (images(8), images(4))}
            polyfed.run(image_regression, method, model="small_cnn", rounds=1, out=None)


def images(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=draw), torch.rand(count, generator=draw)


@pytest.mark.parametrize("method", ["gperxan(guide=0)", "copa(weight=0)", "rsc(features=0)", "guiding(weight=0)", "feddg_ga"])
def test_without_what_needs_labels_no_labels_are_needed(method: str) -> None:
    assert not polyfed.parse(method).facts.class_labels


def test_multilabel_trains_on_rows_of_zero_and_one() -> None:
    x, _ = images(24)
    bright = (x.float().mean(dim=(2, 3)) > 127.5).to(torch.int64)
    part = (x, bright)
    found = polyfed.run({"a": (part, part)}, "fedbn", rounds=8, lr=0.1, batch_size=8, out=None)
    assert found.experiment.federation.task is MULTILABEL and found.headline.measure == "macro_f1"
    assert found.table("macro_f1")["mean"] > 0.7
    answers = found.predict(x[:2])
    assert set(answers[0].probabilities) == {"0", "1", "2"}


def test_the_best_round_is_chosen_by_the_main_measure_of_the_task() -> None:
    train, test = linear_data()["a"]
    data = {"a": (train, test, test)}
    found = polyfed.run(data, "fedavg", model=Linear(1), rounds=3, lr=0.1, selection="best_validation", out=None)
    assert found.table("r2")["mean"] > 0
