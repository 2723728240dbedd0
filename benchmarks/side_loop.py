"""Contender: federated averaging written by hand, in one process."""

from __future__ import annotations

import random

from contenders import Contender
from turns import Turns
from works import Work, batch_positions, build_model, federation, hand_written_round


def run(work: Work, contender: Contender, turns: Turns) -> None:
    """Keep one model and one state; each round samples clients, trains them one after the other and averages."""
    clients = federation(work).clients
    model = build_model(work)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sampling = random.Random(0)
    while not turns.is_over:
        turns.begin()
        cohort = sampling.sample(clients, work.a_round)
        state = hand_written_round(model, state, cohort, lambda client: batch_positions(len(client.train), work.batch))
        turns.end()
