"""Bundles: many clients in a message, with shared tensors in it once; and how the simulation divides clients among messages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from polyfed.core.conversation import Payload
from polyfed.flower.bundles import bundled, unbundled
from polyfed.flower.codec import Encoder, payload_of
from polyfed.flower.records import records_of, wire_message_of
from polyfed.flower.wire_message import BadMessage, WireMessage


def test_many_messages_travel_as_one_with_shared_tensors_once() -> None:
    weights, encoder = {"w": torch.rand(100)}, Encoder()
    messages = [encoder.encode(Payload(weights, {"own": torch.full((2,), float(n))}), {"client": str(n)}) for n in range(5)]
    bundle = bundled(messages)
    assert bundle.size == 400 + 5 * 8
    (content,) = records_of([bundle])
    for number, message in enumerate(unbundled(wire_message_of(content))):
        payload = payload_of(message)
        assert message.control["client"] == str(number)
        assert torch.equal(payload.entries["w"], weights["w"])
        assert torch.equal(payload.extras["own"], torch.full((2,), float(number)))


@pytest.mark.parametrize("control", [{}, {"bundle": 3}, {"bundle": [[{}, {"entries": {"w": "7"}}]]}, {"bundle": [[{}]]}])
def test_a_bundle_that_cannot_be_taken_apart_is_refused(control: dict[str, object]) -> None:
    with pytest.raises(BadMessage, match="its bundle"):
        unbundled(WireMessage(control))


def test_clients_are_divided_evenly_and_in_order() -> None:
    pytest.importorskip("ray")
    from polyfed.flower.simulation import divided

    clients = [str(number) for number in range(10)]
    shares = list(divided(clients, 4))
    assert [client for share in shares for client in share] == clients
    assert {len(share) for share in shares} == {2, 3}
    assert list(divided(clients[:1], 1)) == [["0"]]
