"""Contender: pfl-research, with its own algorithm, backend, aggregation and callbacks.

The data set gives the same shuffled and prepared batches as the hand-written loop. pfl neither resets nor averages the buffers of batch
norm, so it moves a little less than the others; this cannot be removed without replacing its aggregation.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from contenders import Contender
from torch import Tensor, nn
from turns import CannotTakePart, Turns
from works import LEARNING_RATE, Work, batch_positions, build_model, client_name, examples, prepared

ADDRESSES, RANK = "PFL_WORKER_ADDRESSES", "PFL_WORKER_RANK"
NEVER = 10**9


def run(work: Work, contender: Contender, turns: Turns) -> None:
    """Train; with two processes, a second one of the same kind follows this one through pfl's own all-reduce."""
    if contender.options.get("processes") == "2" and RANK not in os.environ:
        lead_two(work, turns)
        return
    train(work, turns)


def lead_two(work: Work, turns: Turns) -> None:
    """Be rank 0, and start rank 1."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{place.getsockname()[1]}"
    os.environ |= {ADDRESSES: f"{address},{address}", RANK: "0"}
    second = [sys.executable, __file__, str(turns.rounds), *sys.argv[1:]]
    with subprocess.Popen(second, env=os.environ | {RANK: "1"}, stdin=subprocess.DEVNULL) as follower:
        try:
            train(work, turns)
        finally:
            if sys.exc_info()[0] is not None:
                follower.kill()


def with_loss(model: nn.Module) -> nn.Module:
    """pfl asks a module for ``loss`` and ``metrics``."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        model.train()
        return nn.functional.cross_entropy(model(x), y)

    model.loss, model.metrics = loss, lambda x, y: {}
    return model


def train(work: Work, turns: Turns | None) -> None:
    """Set up pfl and let it run; ``turns`` is None in a process that follows."""
    try:
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.callback.base import TrainingProcessCallback
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.pytorch import PyTorchTensorDataset
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.metrics import Metrics
        from pfl.model.pytorch import PyTorchModel
    except ImportError as error:
        raise CannotTakePart(f"pfl-research is not installed ({error}); make bench installs it") from error
    following = turns is None
    rounds = int(sys.argv[1]) if turns is None else turns.rounds
    in_pair = RANK in os.environ

    class Shuffled(PyTorchTensorDataset):
        """Yield the same batches as all contenders."""

        def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
            x, y = self.raw_data
            for chunk in batch_positions(len(y), batch_size or len(y)):
                yield [prepared(x[chunk]), y[chunk]]

    class WithoutEvaluation(FederatedAveraging):
        """pfl evaluates at iteration 0 whatever the frequency is."""

        def get_next_central_contexts(self, *args: Any, **kwargs: Any) -> Any:
            contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
            if contexts is not None:
                contexts = tuple(dataclasses.replace(context, do_evaluation=False) for context in contexts)
            return contexts, model, metrics

    def begin() -> None:
        if turns is not None:
            turns.begin()
        if in_pair:
            torch.distributed.barrier()

    class Waits(TrainingProcessCallback):
        def on_train_begin(self, *, model: object) -> Any:
            begin()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: object, model: object, *, central_iteration: int) -> Any:
            if turns is not None:
                turns.end()
            if central_iteration + 1 < rounds:
                begin()
            return False, Metrics()

    held = {client_name(index): examples(work, index) for index in range(work.clients)}
    users = {name: Shuffled((data.x, data.y), user_id=name) for name, data in held.items()}
    data = FederatedDataset(users.__getitem__, sampler_without_repeats(list(users)))
    model = with_loss(build_model(work))
    wrapped = PyTorchModel(
        model, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0)
    )
    sizes = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=NEVER, train_cohort_size=work.a_round, val_cohort_size=None
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=work.batch)
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    WithoutEvaluation().run(sizes, backend, wrapped, local, callbacks=[Waits()], send_metrics_to_platform=False)
    if following:
        torch.distributed.destroy_process_group()


def sampler_without_repeats(names: list[str]) -> Any:
    """pfl's sampler that takes users in turn: the same number of different users in each round as elsewhere."""
    from pfl.data.sampling import MinimizeReuseUserSampler

    return MinimizeReuseUserSampler(names)


def follow() -> None:
    """Be rank 1: the arguments are the number of rounds, then those of the leading process."""
    from works import chosen

    torch.set_num_threads(1)
    train(chosen(sys.argv[2], "--quick" in sys.argv), None)


if __name__ == "__main__":
    follow()
