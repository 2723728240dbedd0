"""Plain Flower's own app, as its documentation writes one: FedAvg on a state dict, one small training step at each node.

``bench_flower_peer.py`` copies this file into an app folder, so it imports nothing of polyfed but the model. The server writes the time
after each round to the file that the run's configuration names.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from flower_payloads import build
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

BATCH = 8
server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds; nothing is evaluated."""
    config = context.run_config
    nodes, ends = int(str(config["nodes"])), Path(str(config["ends"]))

    def note(server_round: int, arrays: ArrayRecord) -> None:
        with ends.open("a") as file:
            file.write(f"{time.monotonic()}\n")

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    model = build(str(config["model"]))
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=int(str(config["rounds"])), evaluate_fn=note)


@client.train()
def train(message: Message, context: Context) -> Message:
    """One step, from the weights that came to those that go back."""
    torch.set_num_threads(1)
    model = build(str(context.run_config["model"]))
    arrays = message.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    model.load_state_dict(arrays.to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.functional.cross_entropy(model(torch.rand(BATCH, 3, 28, 28)), torch.arange(BATCH) % 10)
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": BATCH})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
