"""Partitions: every training example lands exactly once, and each rule splits as its paper says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.data_types import ArrayExamples, ClientData, DataSet, DatasetExamples, Domain, Examples
from polyfed.data.partitions import label_skew
from polyfed.data.partitions.label_skew import per_class_counts
from polyfed.data.partitions.partition import federate
from polyfed.data.registry import partitions
from polyfed.errors import DataError, OptionError, PolyfedError, SettingError, UnknownName


def examples(name: int, split: int, labels: Sequence[int]) -> ArrayExamples:
    """Return examples whose single pixel is a unique number: domain, split, position."""
    numbers = name * 1_000_000 + split * 100_000 + torch.arange(len(labels))
    return ArrayExamples(numbers.view(-1, 1, 1, 1), torch.tensor(list(labels), dtype=torch.int64))


def made(sizes: Sequence[int], classes: int = 4, validation: int = 0, test: int = 3, seed: int = 0, groups: bool = True) -> DataSet:
    random = np.random.default_rng(seed)
    domains = tuple(
        Domain(
            name=f"D{number}",
            train=examples(number, 0, random.integers(classes, size=size).tolist()),
            test=examples(number, 1, [0] * test),
            validation=examples(number, 2, random.integers(classes, size=validation).tolist()) if validation else None,
            groups=torch.arange(size) % 3 if groups else None,
        )
        for number, size in enumerate(sizes)
    )
    return DataSet("made", tuple("abcdefghij"[:classes]), domains)


def numbers(part: Examples | None) -> list[int]:
    return [] if part is None or not len(part) else [int(number) for number in part.batch(slice(None))[0].flatten()]


def partition(text: str, dataset: DataSet, seed: int = 0) -> tuple[ClientData, ...]:
    clients: tuple[ClientData, ...] = partitions.build(text, dataset=dataset, seed=seed)
    return clients


def sizes_of(clients: Sequence[ClientData]) -> list[int]:
    return [len(client.train) for client in clients]


ALL = [
    "domain",
    "domain_even(clients=3)",
    "domain_parts(parts=2)",
    "iid(clients=5)",
    "dirichlet(clients=4, alpha=0.5, minimum=1)",
    'dirichlet(clients=4, alpha=0.1, rule="per_client", minimum=1)',
    "shards(clients=6, classes_per_client=2)",
    "natural",
    "domain_split(clients=3, domains_per_client=1)",
    "domain_split(clients=4, domains_per_client=2)",
]


def test_all_partitions_are_tested_here() -> None:
    assert {text.split("(")[0] for text in ALL} == set(partitions.names())


@pytest.mark.parametrize("text", ALL)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    validation=st.integers(0, 20),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_every_example_lands_exactly_once(text: str, sizes: list[int], validation: int, seed: int) -> None:
    dataset = made(sizes, validation=validation, seed=seed)
    try:
        clients = partition(text, dataset, seed)
    except DataError:
        return
    trained = [number for client in clients for number in numbers(client.train)]
    validated = [number for client in clients for number in numbers(client.validation)]
    expected = [number for domain in dataset.domains for number in numbers(domain.train) + numbers(domain.validation)]
    assert Counter(trained + validated) == Counter(expected)
    assert len({client.id for client in clients}) == len(clients)
    for client in clients:
        held = {f"D{number // 1_000_000}" for number in numbers(client.train)}
        assert held == set(client.domains) == set(client.tests)
        assert {f"D{number // 1_000_000}" for number in numbers(client.validation)} <= held
        assert all(client.tests[name] is dataset.domain(name).test for name in client.domains)
        labels = {
            number: int(label)
            for domain in dataset.domains
            for number, label in zip(numbers(domain.train), domain.train.labels, strict=True)
        }
        assert [labels[number] for number in numbers(client.train)] == client.train.labels.tolist()


@pytest.mark.parametrize("text", ALL)
def test_enough_data_always_works(text: str) -> None:
    """The property above may skip what is too small; with enough examples every rule must work."""
    for seed in range(5):
        assert partition(text, made([60, 50, 40], seed=seed), seed)


@pytest.mark.parametrize("text", [text for text in ALL if text.split("(")[0] not in {"domain", "domain_parts", "natural"}])
def test_the_seed_decides(text: str) -> None:
    dataset = made([60, 50, 40])
    first, again, other = ([numbers(client.train) for client in partition(text, dataset, seed)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_domain() -> None:
    dataset = made([4, 9], validation=2)
    clients = partition("domain", dataset)
    assert [client.id for client in clients] == ["D0", "D1"]
    assert clients[1].train is dataset.domains[1].train
    assert clients[1].validation is dataset.domains[1].validation


@given(size=st.integers(1, 200), clients=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_domain_even_pieces_differ_by_at_most_one(size: int, clients: int) -> None:
    if size < clients:
        with pytest.raises(DataError, match=f"left for {clients - size} of {clients} clients"):
            partition(f"domain_even(clients={clients})", made([size]))
        return
    sizes = sizes_of(partition(f"domain_even(clients={clients})", made([size])))
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1


def test_domain_even_names_clients_and_leaves_other_domains_alone() -> None:
    clients = partition("domain_even(clients=20)", made([45, 40]))
    assert [client.id for client in clients][5:7] == ["D0-05", "D0-06"]
    assert len(clients) == 40
    wide = partition("domain_even(clients=101)", made([200]))
    assert wide[100].id == "D0-100"
    assert wide[7].id == "D0-007"
    without = federate(made([45, 40]), "domain_even(clients=20)", unseen=["D0"]).clients
    assert [numbers(client.train) for client in without] == [numbers(client.train) for client in clients[20:]]


def test_domain_parts_are_those_of_fedbn() -> None:
    """Part i of 7,438 examples goes from int(743.8 i) to int(743.8 (i + 1))."""
    clients = partition("domain_parts(parts=4, out_of=10)", made([7438]))
    bounds = [(0, 743), (743, 1487), (1487, 2231), (2231, 2975)]
    assert [numbers(client.train) for client in clients] == [list(range(*bound)) for bound in bounds]
    assert sizes_of(partition("domain_parts(parts=2)", made([1487]))) == [743, 744]


def test_dirichlet_per_class_as_published() -> None:
    """100 clients on CIFAR-10: at least 10 examples each, and more skew with a smaller alpha."""
    cifar = made([50_000], classes=10)
    held = {}
    for alpha in (0.1, 1.0):
        clients = partition(f"dirichlet(clients=100, alpha={alpha})", cifar)
        assert min(sizes_of(clients)) >= 10
        assert sum(sizes_of(clients)) == 50_000
        held[alpha] = np.mean(
            [np.bincount(client.train.labels.numpy(), minlength=10).max() / len(client.train) for client in clients]
        )
    assert held[0.1] > 0.6 > held[1.0] > 0.2


def test_dirichlet_per_class_gives_nothing_more_to_a_full_client() -> None:
    counts = per_class_counts(np.full(10, 500), clients=20, alpha=0.3, minimum=10, random=np.random.default_rng(0))
    held_before = np.cumsum(counts, axis=1) - counts
    assert (held_before >= 250).any()
    assert not counts[held_before >= 250].any()
    assert counts.sum(axis=0).tolist() == [500] * 10


def test_dirichlet_per_client_gives_equal_sizes_and_the_drawn_skew() -> None:
    clients = partition('dirichlet(clients=40, alpha=0.1, rule="per_client")', made([4_010], classes=10))
    assert set(sizes_of(clients)) == {100, 101}
    largest = [np.bincount(client.train.labels.numpy(), minlength=10).max() / len(client.train) for client in clients]
    # The largest of ten shares from Dir(0.1) is 0.7 on average; from a uniform split it would be near 0.16.
    assert 0.5 < np.mean(largest[:20]) < 0.9


@given(clients=st.integers(1, 30), per_client=st.integers(1, 4), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_shards_give_each_client_exactly_so_many_classes(clients: int, per_client: int, seed: int) -> None:
    dataset = made([600, 600], classes=4, seed=seed)
    text = f"shards(clients={clients}, classes_per_client={per_client})"
    if clients * per_client < 4:
        with pytest.raises(DataError, match="do not cover the 4 classes"):
            partition(text, dataset, seed)
        return
    for client in partition(text, dataset, seed):
        assert len(set(client.train.labels.tolist())) == per_client


def test_shards_of_cifar_pair_many_classes() -> None:
    clients = partition("shards(clients=100, classes_per_client=2)", made([5_000], classes=10))
    pairs = {tuple(sorted(set(client.train.labels.tolist()))) for client in clients}
    assert len(pairs) > 25
    five = partition("shards(clients=5)", made([500], classes=10))
    assert sorted(label for client in five for label in set(client.train.labels.tolist())) == list(range(10))


def test_natural_ids() -> None:
    dataset = made([7, 6])
    clients = partition("natural", dataset)
    assert [client.id for client in clients] == ["D0-0", "D0-1", "D0-2", "D1-0", "D1-1", "D1-2"]
    assert numbers(clients[1].train) == [1, 4]
    bare = DataSet("bare", ("a",), (Domain("X", examples(0, 0, [0]), examples(0, 1, [0])),))
    with pytest.raises(DataError, match="X of bare has no natural ids"):
        partition("natural", bare)


@given(
    sizes=st.lists(st.integers(40, 90), min_size=1, max_size=5),
    clients=st.integers(1, 8),
    each=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_domain_split_gives_each_client_exactly_so_many_domains(sizes: list[int], clients: int, each: int, seed: int) -> None:
    dataset = made(sizes)
    text = f"domain_split(clients={clients}, domains_per_client={each}, held_out=0)"
    if each > len(sizes) or clients * each < len(sizes):
        with pytest.raises(DataError, match="do not cover"):
            partition(text, dataset, seed)
        return
    made_clients = partition(text, dataset, seed)
    assert all(len(client.domains) == each for client in made_clients)
    parts = Counter(name for client in made_clients for name in client.domains)
    low, extra = divmod(clients * each, len(sizes))
    assert Counter(parts.values()) == Counter({low + 1: extra, low: len(sizes) - extra} if extra else {low: len(sizes)})
    most = [len(dataset.domain(name).train) for name, count in parts.items() if count == low + 1]
    rest = [len(dataset.domain(name).train) for name, count in parts.items() if count == low]
    assert not most or min(most) >= max(rest)


def test_domain_split_example_of_the_paper() -> None:
    """Two clients with two of three domains each: the largest domain is halved, the others stay whole."""
    clients = partition("domain_split(clients=2, domains_per_client=2, held_out=0)", made([10, 30, 20]))
    held = [Counter(number // 1_000_000 for number in numbers(client.train)) for client in clients]
    assert [client[1] for client in held] == [15, 15]
    assert sorted((client[0], client[2]) for client in held) == [(0, 20), (10, 0)]


def test_domain_split_holds_out_a_tenth_only_without_validation() -> None:
    clients = partition("domain_split(clients=3)", made([40, 50, 60], groups=False))
    assert sorted((len(client.train), len(client.validation or [])) for client in clients) == [(36, 4), (45, 5), (54, 6)]
    given_validation = partition("domain_split(clients=3)", made([40, 50, 60], validation=7))
    assert sorted((len(client.train), len(client.validation or [])) for client in given_validation) == [(40, 7), (50, 7), (60, 7)]


def test_validation_follows_the_training_shares() -> None:
    """Clients with two classes get validation of these two, in proportion to what they train on."""
    clients = partition("shards(clients=4, classes_per_client=1)", made([400], validation=80))
    for client in clients:
        assert client.validation is not None
        assert set(client.validation.labels.tolist()) == set(client.train.labels.tolist())
    even = partition("domain_even(clients=8)", made([800], validation=80))
    assert all(4 <= len(client.validation or []) <= 16 for client in even)
    assert sum(len(client.validation or []) for client in even) == 80


class Unread(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set whose items must not be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        raise AssertionError(f"item {position} was read")


@pytest.mark.parametrize("text", ["domain", "domain_even(clients=3)", "domain_parts(parts=3)", "iid(clients=3)"])
def test_splits_that_need_no_labels_read_no_items(text: str) -> None:
    lazy = DatasetExamples(Unread())
    clients = partition(text, DataSet("lazy", ("a", "b"), (Domain("X", lazy, lazy),)))
    assert sum(sizes_of(clients)) == 12


@pytest.mark.parametrize(
    ("text", "size", "error", "said"),
    [
        ("dirichlet(clients=10, alpha=1)", 50, DataError, "50 training examples, too few for 10 clients with at least 10 each"),
        ("dirichlet(clients=10, alpha=0.01)", 100, DataError, "larger alpha"),
        ("dirichlet(clients=2, alpha=0)", 50, OptionError, "alpha must be greater than 0"),
        ('dirichlet(clients=2, alpha=1, rule="perclass")', 50, OptionError, "'per_class' or 'per_client'"),
        ("domain_parts(parts=4, out_of=3)", 50, OptionError, "out_of must be at least 4, got 3"),
        ("domain_even(clients=4)", 2, DataError, r"left for 2 of 4 clients: D0-00, D0-02\."),
        ("iid(clients=100)", 1, DataError, "and 89 more"),
        ("domain_even(clients=0)", 20, OptionError, "must be at least 1"),
        ("iid(clients=0)", 20, OptionError, "must be at least 1"),
        ("shards(clients=0)", 20, OptionError, "must be at least 1"),
        ("domain_parts(parts=0)", 20, OptionError, "must be at least 1"),
        ("domain_split(clients=0)", 20, OptionError, "must be at least 1"),
    ],
)
def test_impossible_partitions_are_rejected(
    text: str, size: int, error: type[PolyfedError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_skew, "MAX_DRAWS", 100)
    with pytest.raises(error, match=said):
        partition(text, made([size]))


def test_federate_holds_out_domains() -> None:
    dataset = made([5, 6, 7], validation=2)
    federation = federate(dataset, unseen=["D1"])
    assert [client.id for client in federation.clients] == ["D0", "D2"]
    assert federation.unseen["D1"] is dataset.domains[1].test
    assert federation.classes == dataset.classes
    whole = federate(dataset, unseen="D1", unseen_part="all").unseen["D1"]
    assert sorted(numbers(whole)) == sorted(number for part in _parts(dataset.domains[1]) for number in numbers(part))


@pytest.mark.parametrize("unseen_part", ["test", "all"])
def test_few_shots_are_trained_on_and_never_tested(unseen_part: str) -> None:
    dataset = made([20, 20, 20])
    plain = federate(dataset, unseen=["D2"], unseen_part=unseen_part)
    federation = federate(dataset, unseen=["D2"], few_shot=4, unseen_part=unseen_part)
    added = [
        sorted(set(numbers(few.train)) - set(numbers(none.train)))
        for few, none in zip(federation.clients, plain.clients, strict=True)
    ]
    assert [len(part) for part in added] == [4, 4]
    shots = {number for part in added for number in part}
    assert shots <= set(numbers(dataset.domains[2].train))
    assert len(shots) == 8
    assert not shots & set(numbers(federation.unseen["D2"]))
    assert len(federation.unseen["D2"]) == (3 if unseen_part == "test" else 20 - 8 + 3)
    assert [client.domains for client in federation.clients] == [("D0",), ("D1",)]


@pytest.mark.parametrize(
    ("settings_given", "error", "said"),
    [
        ({"unseen": ["D9"]}, DataError, "has no domain 'D9'"),
        ({"unseen": ["D0", "D1"]}, DataError, "Leave at least one domain seen"),
        ({"unseen": ["D0"], "unseen_part": "train"}, OptionError, "'test' or 'all'"),
        ({"few_shot": 2}, OptionError, "at least one unseen domain"),
        ({"unseen": ["D0"], "few_shot": 11}, DataError, "need 11 training examples of D0, which has 10. Use at most 10"),
        ({"partition": "dirichlt(clients=2, alpha=1)"}, UnknownName, "Did you mean dirichlet"),
        ({"partition": "iid(clients=2)", "seed": -1}, SettingError, "at least 0"),
    ],
)
def test_federate_rejects(settings_given: dict[str, object], error: type[PolyfedError], said: str) -> None:
    with pytest.raises(error, match=said):
        federate(made([10, 10]), **settings_given)  # type: ignore[arg-type]


def _parts(domain: Domain) -> list[Examples]:
    assert domain.validation is not None
    return [domain.train, domain.validation, domain.test]
