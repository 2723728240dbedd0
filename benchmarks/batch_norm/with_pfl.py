"""pfl-research: FederatedAveraging of a PyTorchModel; the argument says how users are weighted, ``default`` or ``samples``."""

from __future__ import annotations

import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from two_clients import BATCH, LEARNING_RATE, ROUNDS, SAMPLES, Net, images, note


class NetWithLoss(Net):
    """pfl asks a module for ``loss`` and ``metrics``."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    users = {str(client): PyTorchTensorDataset(images(client), user_id=str(client)) for client in SAMPLES}
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(users)))
    net = NetWithLoss()
    model = PyTorchModel(net, torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS, evaluation_frequency=ROUNDS, train_cohort_size=len(SAMPLES), val_cohort_size=None
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()] if sys.argv[1] == "samples" else []),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH),
        send_metrics_to_platform=False,
    )
    note("server", net)
