"""FL4Health: a server and two clients over gRPC, as its examples start them; the argument is the exchanger, ``full`` or ``fedbn``."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from fl4health.client_managers.base_sampling_manager import SimpleClientManager
from fl4health.clients.basic_client import BasicClient
from fl4health.clients.fedbn_client import FedBnClient
from fl4health.parameter_exchange.layer_exchanger import LayerExchangerWithExclusions
from fl4health.servers.base_server import FlServer
from fl4health.strategies.basic_fedavg import BasicFedAvg
from flwr.client import start_client
from flwr.common import parameters_to_ndarrays
from flwr.server import ServerConfig, start_server
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_clients import BATCH, LEARNING_RATE, ROUNDS, SAMPLES, Net, images, write


class Trains(BasicClient):
    """A client with the methods that FL4Health requires."""

    def __init__(self, client: int) -> None:
        super().__init__(data_path=Path(), metrics=[], device=torch.device("cpu"))
        self.client = client

    def get_model(self, config: Any) -> nn.Module:
        return Net()

    def get_data_loaders(self, config: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
        held = TensorDataset(*images(self.client))
        return DataLoader(held, batch_size=BATCH), DataLoader(held, batch_size=BATCH)

    def get_optimizer(self, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def get_criterion(self, config: Any) -> nn.Module:
        return nn.CrossEntropyLoss()


class TrainsWithFedBn(Trains, FedBnClient):
    """A client whose batch norm is not exchanged, as in the documentation of FedBnClient."""

    def get_parameter_exchanger(self, config: Any) -> LayerExchangerWithExclusions:
        return LayerExchangerWithExclusions(self.model, {nn.BatchNorm2d})


KINDS = {"full": Trains, "fedbn": TrainsWithFedBn}


def be_client(kind: str, client: int, address: str) -> None:
    start_client(server_address=address, client=KINDS[kind](client).to_client(), insecure=True)


def start_clients(kind: str, port: int) -> None:
    """Start the clients once the server listens: they do not wait for it."""
    while not listens(port):
        time.sleep(0.2)
    spawned = multiprocessing.get_context("spawn")
    for client in SAMPLES:
        spawned.Process(target=be_client, args=(kind, client, f"127.0.0.1:{port}")).start()


def listens(port: int) -> bool:
    with socket.socket() as place:
        return place.connect_ex(("127.0.0.1", port)) == 0


def config_of_round(server_round: int) -> dict[str, Any]:
    return {"current_server_round": server_round, "local_epochs": 1, "batch_size": BATCH}


def names_exchanged(kind: str) -> list[str]:
    model = Net()
    return list(model.state_dict()) if kind == "full" else LayerExchangerWithExclusions(model, {nn.BatchNorm2d}).layers_to_transfer


def main(kind: str) -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    address = f"127.0.0.1:{port}"
    threading.Thread(target=start_clients, args=(kind, port), daemon=True).start()
    strategy = BasicFedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=len(SAMPLES),
        min_available_clients=len(SAMPLES),
        on_fit_config_fn=config_of_round,
    )
    server = FlServer(SimpleClientManager(), config_of_round(0), strategy, on_init_parameters_config_fn=config_of_round)
    start_server(server=server, server_address=address, config=ServerConfig(num_rounds=ROUNDS))
    values = parameters_to_ndarrays(server.parameters)
    write("server", {name: value.tolist() for name, value in zip(names_exchanged(kind), values, strict=True)})


if __name__ == "__main__":
    main(sys.argv[1])
