"""Flower, message API: a state dict as an ArrayRecord both ways, as in its quickstart for PyTorch, and the strategy FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from two_clients import ROUNDS, SAMPLES, Net, train, write

server = ServerApp()
client = ClientApp()


@client.train()
def train_at_client(message: Message, context: Context) -> Message:
    """Load what was sent, train, and send the state back."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    count = train(model, int(context.node_config["partition-id"]) + 1)
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": count})})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Two rounds of FedAvg."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=len(SAMPLES), min_available_nodes=len(SAMPLES))
    result = strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=ROUNDS)
    write("server", {name: value.tolist() for name, value in result.arrays.to_torch_state_dict().items()})


if __name__ == "__main__":
    run_simulation(server_app=server, client_app=client, num_supernodes=len(SAMPLES))
