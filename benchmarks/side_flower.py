"""Contender: Flower's simulation (Ray), with its own strategy; one CPU and one thread for each actor.

An actor keeps the model and the clients' data between messages, which is more than Flower's examples do. Flower's server calls
``evaluate_fn`` after each round; here it evaluates nothing and waits for the driver, so that rounds can be interleaved as for all contenders.
"""

from __future__ import annotations

import functools

import torch
from contenders import Contender
from torch import nn
from turns import CannotTakePart, Turns
from works import Work, batch_positions, build_model, examples, train_client

try:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
except ImportError as missing:
    raise CannotTakePart(f"flwr with its simulation is not installed ({missing}); make bench installs it") from missing


@functools.cache
def resident_model(work: Work) -> nn.Module:
    """The model of this actor, built once."""
    torch.set_num_threads(1)
    return build_model(work)


data_of = functools.cache(examples)


def client_app(work: Work) -> ClientApp:
    """Load what was sent, train, and send the state back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from side_flower import data_of, resident_model  # the actor's own copies: what is pickled along would be built anew

        model = resident_model(work)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        held = data_of(work, int(context.node_config["partition-id"]))
        train_client(model, held, batch_positions(len(held), work.batch))
        content = RecordDict(
            {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(held)})},
        )
        return Message(content=content, reply_to=message)

    return app


def run(work: Work, contender: Contender, turns: Turns) -> None:
    """Hold a simulation whose rounds wait for the driver."""
    failures: list[str] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def wait(server_round: int, arrays: ArrayRecord) -> None:
            if server_round:
                turns.end()
            if not turns.is_over:
                turns.begin()

        strategy = FedAvg(
            fraction_train=work.a_round / work.clients,
            min_train_nodes=work.a_round,
            min_available_nodes=work.clients,
            fraction_evaluate=0.0,
        )
        result = strategy.start(grid, ArrayRecord(build_model(work).state_dict()), num_rounds=turns.rounds, evaluate_fn=wait)
        if len(result.train_metrics_clientapp) != turns.rounds:
            failures.append("clients failed in some rounds; see the log")

    run_simulation(
        server_app=server,
        client_app=client_app(work),
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": int(contender.options["actors"]), "include_dashboard": False, "log_to_driver": False},
        },
    )
    if failures:
        raise RuntimeError(failures[0])
