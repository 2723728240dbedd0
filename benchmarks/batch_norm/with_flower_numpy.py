"""Flower, NumPyClient: all values of a state dict as a list of arrays, as its older quickstarts do, and the strategy FedAvg."""

from __future__ import annotations

from typing import Any

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from two_clients import ROUNDS, SAMPLES, Net, train, write


def get_weights(model: nn.Module) -> list[Any]:
    return [value.cpu().numpy() for value in model.state_dict().values()]


def set_weights(model: nn.Module, values: list[Any]) -> None:
    model.load_state_dict({name: torch.tensor(value) for name, value in zip(model.state_dict(), values, strict=True)})


class Trains(NumPyClient):
    """One client."""

    def __init__(self, client: int) -> None:
        self.client = client

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        model = Net()
        set_weights(model, parameters)
        count = train(model, self.client)
        return get_weights(model), count, {}


def noted(server_round: int, parameters: list[Any], config: dict[str, Any]) -> None:
    """Flower evaluates the server's model after each round; here the last one is noted."""
    if server_round == ROUNDS:
        write("server", {name: value.tolist() for name, value in zip(Net().state_dict(), parameters, strict=True)})


def client_for(context: Context) -> Any:
    return Trains(int(context.node_config["partition-id"]) + 1).to_client()


def server_for(context: Context) -> ServerAppComponents:
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=len(SAMPLES),
        min_available_clients=len(SAMPLES),
        initial_parameters=ndarrays_to_parameters(get_weights(Net())),
        evaluate_fn=noted,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


if __name__ == "__main__":
    run_simulation(
        server_app=ServerApp(server_fn=server_for), client_app=ClientApp(client_fn=client_for), num_supernodes=len(SAMPLES)
    )
