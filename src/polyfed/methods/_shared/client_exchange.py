"""An exchange before round 1: collect a value from every client, and send each client the values of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.part import Part
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import Exchange, Payload, Request
from polyfed.core.server import Server
from polyfed.errors import ClientFailure, DataError, JoinError

LARGEST_PIXEL = 1e6
"""Largest prepared input. Other clients train with the values that a client sends, so larger ones are rejected."""


def input_type(context: RequestContext) -> torch.dtype:
    return context.server.input_dtype


@dataclass(frozen=True)
class ClientExchange(Part):
    """The setup: one request collects, one distributes. The server keeps nothing afterwards."""

    part: str

    @property
    def collect(self) -> str:
        return f"{self.part}_collect"

    @property
    def hand_out(self) -> str:
        return f"{self.part}_bank"

    def __call__(self, server: Server) -> Exchange[None]:
        ids = [info.id for info in server.clients]
        replies = yield Request(self.collect, dict.fromkeys(ids, Payload()))
        given = {reply.client: reply.extras["given"] for reply in replies}
        answered = [client for client in ids if client in given or client in server.rejected]
        banks = {client: [value for other, value in given.items() if other != client] for client in answered}
        yield Request(self.hand_out, {client: Payload(extras={"bank": bank}) for client, bank in banks.items() if bank})

    def keep(self, client: Client, payload: Payload) -> None:
        client.memory[self.part] = payload.extras["bank"]

    def bank(self, client: Client) -> list[Any]:
        """Return one value per other client, in the server's order."""
        if self.part not in client.memory:
            raise ClientFailure(
                f"{self.part}: client {client.id} has no values from the other clients, because it was absent from the exchange before round 1."
            )
        return client.memory[self.part]  # type: ignore[no-any-return]

    def refuse_one_client(self, clients: int) -> None:
        if clients < 2:
            raise JoinError(f"{self.part} exchanges values between clients, but there is only one client. Remove {self.part}.")


def require_images(part: str, client: Client, x: Tensor) -> None:
    if x.dim() != 4:
        raise DataError(
            f"{part}: client {client.id} has inputs of shape {tuple(x.shape[1:])}. Use images (channels, height, width)."
        )


def pixel_range(client: Client, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return black and white as prepared values per channel, on the device of ``x``; None if inputs are not ``uint8``."""
    raw, _ = client.data.train.batch(slice(0, 1))
    if raw.dtype != torch.uint8:
        return None
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, x.shape[1], 1, 1)
    black, white = client.bench.preparation.for_testing(ends).to(x.device).unbind()
    return black, white
