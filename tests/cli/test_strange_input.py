"""Strange options, recipes, run folders and images, drawn by hypothesis: exit code 0, 1 or 2, one sentence, never a stack trace.

Nothing is trained for long here: rounds are left out, so that a valid but huge number of them ends too.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.command_line import Ended
from polyfed.cli.guard import INTERNAL_ERROR_MESSAGE
from polyfed.cli.main import app
from polyfed.core.method import methods
from polyfed.core.server import Server
from polyfed.runs import experiment
from polyfed.settings import setting_names

QUICK, MANY = 40, 1500
SMALL = ("--model", "small_cnn(width=4)")
DATA, RUN, IMAGE = "pictures", "run", "image.png"
TEXTS = (
    *("", " ", "-", "--", ".", "..", "/", "~", "*", "%s", "{}", "[", "(", "a=b", "=", ";", ",", "+", "fedavg +", "fedbn(", "#"),
    *("nan", "inf", "-inf", "-1", "0", "1", "0.5", "1e308", "-1e308", "1e-320", "2147483648", "9" * 400, "0x10", "1_000", "True"),
    *("None", "auto", "all", "a\nb", "\x1b[31mred", "\udcff", "\u202e", "x" * 300, "é" * 150, "((((" * 50, RUN, IMAGE, DATA),
)
"""Values that are tried more often than chance would; NUL cannot be in an argument."""
WRITES = ("--out", "-o")
IMPORTS = ("--model", "--load")
ENDS_ELSEWHERE = ("--help", "--debug", "--version", "--compile", "--estimate", "--install-completion", "--show-completion")
START: dict[str, tuple[str, ...]] = {
    "run": (DATA, *SMALL),
    "compare": (DATA, "--methods", "fedavg", *SMALL),
    "sweep": (DATA, "--methods", "fedavg", "--lr", "0.1", *SMALL),
    "resume": (RUN,),
    "evaluate": (RUN,),
    "predict": (RUN, IMAGE),
    "report": (RUN, "-o", "page.html"),
    "digest": (RUN,),
    "inspect": (RUN,),
    "ls": ("methods",),
    "show": ("fedbn",),
}
"""A good command line of each command."""
OF_RUNS: dict[str, tuple[str, ...]] = {
    name: START[name] for name in ("resume", "evaluate", "predict", "report", "digest", "inspect")
}

texts = st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts
trees = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with images, a run, a recipe and a picture. Training holds no rounds from here on."""
    folder = tmp_path_factory.mktemp("strange")
    with pytest.MonkeyPatch.context() as patch:
        methods.discover()
        patch.setattr(methods, "_records", dict(methods.known()))
        patch.setattr(experiment, "run_rounds", hold_nothing)
        patch.setenv("POLYFED_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "160")
        patch.chdir(folder)
        make_images(folder / DATA)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / IMAGE)
        (folder / "recipe.toml").write_text(f'[settings]\ndata = "{DATA}"\nrounds = 1\n')
        ended = command("run", DATA, "--rounds", "1", "--out", "good", "-q", *SMALL)
        assert ended.code == 0, ended.err
        yield folder


def hold_nothing(method: Any, server: Server, *others: Any) -> None:
    """In the place of the loop: the last round is reached without any training."""
    server.round = server.rounds


def make_images(root: Path) -> None:
    rng = np.random.default_rng(0)
    for domain in ("day", "night"):
        for label in ("disk", "stripe"):
            (root / domain / label).mkdir(parents=True)
            for number in range(10):
                Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(root / domain / label / f"{number}.png")


def command(*words: str) -> Ended:
    """Run a command in this process; what is no exit but an error shows in the test."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app.main(list(words), prog_name="polyfed")
        except SystemExit as end:
            code = end.code
    return Ended(0 if code is None else code, out.getvalue(), err.getvalue())


def tidy(folder: Path) -> None:
    """Put back what commands may have changed."""
    for path in folder.iterdir():
        if path.name not in (DATA, IMAGE, "recipe.toml", "good", "cache"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(folder / "good", folder / RUN)


def check(words: Sequence[str]) -> None:
    """The command ends as it should, and says why where it does not succeed."""
    ended = command(*words)
    assert ended.code in (0, 1, 2), (words, ended)
    assert "Traceback" not in ended.err and INTERNAL_ERROR_MESSAGE not in ended.err, (words, ended.err)
    if ended.code:
        assert (ended.err + ended.out).strip(), (words, ended)
    assert "\x1b[31m" not in ended.err, (words, "an escape sequence reached the terminal")


def options_of(name: str) -> list[Any]:
    parameters = app.get_command(None, name).params
    return [one for one in parameters if one.param_type_name == "option" and not set(one.opts) & set(ENDS_ELSEWHERE)]


@st.composite
def option(draw: st.DrawFn, name: str) -> list[str]:
    """One option of a command, with a strange value."""
    chosen = draw(st.sampled_from(options_of(name)))
    flag = draw(st.sampled_from(chosen.opts))
    if chosen.is_flag:
        return [flag]
    if flag in WRITES:
        return [flag, draw(st.sampled_from(["", " ", "x" * 300, "a\nb", IMAGE, f"{IMAGE}/run", "\x1b[31m", "\udcff", RUN, DATA]))]
    if flag in IMPORTS:  # what a user names is imported, whatever it does
        return [flag, draw(texts).replace(":", "")]
    if flag == "--set":
        return [flag, f"{draw(st.sampled_from(setting_names()) | texts)}={draw(texts)}"]
    return [flag, draw(texts | st.integers().map(str) | st.floats().map(str))]


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A good command line with some options more, and perhaps another first word."""
    name = draw(st.sampled_from(sorted(START)))
    words = list(START[name])
    if draw(st.integers(0, 3)) == 0:
        words[0] = draw(texts)
    for _ in range(draw(st.integers(0, 3))):
        words += draw(option(name))
    return [name, *words]


def drawn(examples: int) -> Any:
    """Hypothesis with a number of examples; the home is the same for all of them, and tidied before each."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def strange_options(examples: int, folder: Path) -> None:
    @drawn(examples)
    @given(command_lines())
    def each(words: list[str]) -> None:
        tidy(folder)
        check(words)

    each()


def toml(value: Any) -> str:
    """A value as TOML; what TOML cannot say as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(str(name))} = {toml(one)}" for name, one in value.items()) + "}"
    text = "".join(f"\\u{ord(c):04x}" if ord(c) < 65536 else c for c in str(value) if not 0xD800 <= ord(c) < 0xE000)
    return f'"{text}"'


recipes = (
    st.binary(max_size=60)
    | texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.dictionaries(st.sampled_from([*setting_names(), "strange"]), trees, max_size=4).map(
        lambda values: ("[settings]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in values.items())).encode()
    )
    | st.dictionaries(st.sampled_from(["settings", "methods", "seeds", "claims", "name", "protocol"]), trees, max_size=3).map(
        lambda values: "".join(f"{name} = {toml(value)}\n" for name, value in values.items()).encode()
    )
)


def strange_recipes(examples: int, folder: Path) -> None:
    @drawn(examples)
    @given(recipes, st.sampled_from([("run", "--recipe"), ("compare", "--methods", "fedavg", "--recipe")]))
    def each(content: bytes, words: tuple[str, ...]) -> None:
        tidy(folder)
        (folder / "strange.toml").write_bytes(content)
        check([*words, "strange.toml"])

    each()


def strange_folders(examples: int, folder: Path) -> None:
    files = sorted(path.relative_to(folder / "good") for path in (folder / "good").rglob("*") if path.is_file())

    @drawn(examples)
    @given(st.sampled_from(files), recipes | st.none() | st.just(b"[" * 20_000), st.sampled_from(sorted(OF_RUNS)))
    def each(file: Path, content: bytes | None, name: str) -> None:
        tidy(folder)
        target = folder / RUN / file
        target.unlink()
        if content is None:
            target.mkdir()
        else:
            target.write_bytes(content)
        check([name, *OF_RUNS[name]])

    each()


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=20).filter(
    lambda n: n not in (".", "..")
)


@st.composite
def pictures(draw: st.DrawFn) -> bytes:
    """The bytes of an image file: of another size, mode or format, cut off, or no image at all."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=80))
    mode = draw(st.sampled_from(["RGB", "L", "1", "P", "RGBA", "CMYK", "I;16", "F", "LA"]))
    size = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["PNG", "GIF", "TIFF", "BMP", "JPEG"]))
    made = io.BytesIO()
    try:
        Image.new(mode, size).save(made, kind)
    except (OSError, ValueError):
        Image.new("RGB", size).save(made, kind)
    whole = made.getvalue()
    return whole if draw(st.booleans()) else whole[: draw(st.integers(0, len(whole)))]


image_trees = st.dictionaries(
    names, st.dictionaries(names, st.dictionaries(names.map(lambda n: f"{n}.png"), pictures(), max_size=3), max_size=3), max_size=3
)
OF_IMAGES: tuple[tuple[str, ...], ...] = (
    ("run", "strange", "--rounds", "1", *SMALL),
    ("evaluate", RUN, "strange"),
    ("predict", RUN, "strange"),
    ("data", "check", "strange"),
)


def strange_images(examples: int, folder: Path) -> None:
    @drawn(examples)
    @given(image_trees, st.sampled_from(OF_IMAGES))
    def each(tree: dict[str, dict[str, dict[str, bytes]]], words: tuple[str, ...]) -> None:
        tidy(folder)
        (folder / "strange").mkdir()
        for domain, labels in tree.items():
            for label, files in labels.items():
                (folder / "strange" / domain / label).mkdir(parents=True, exist_ok=True)
                for name, content in files.items():
                    with contextlib.suppress(OSError):  # a name the file system does not take
                        (folder / "strange" / domain / label / name).write_bytes(content)
        check(words)

    each()


KINDS = {"options": strange_options, "recipes": strange_recipes, "folders": strange_folders, "images": strange_images}


@pytest.mark.parametrize("kind", KINDS)
def test_strange_input_ends_with_a_sentence(kind: str, home: Path) -> None:
    KINDS[kind](QUICK, home)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_much_strange_input_ends_with_a_sentence(kind: str, home: Path) -> None:
    KINDS[kind](MANY, home)


def test_budgets_that_no_machine_could_spend_are_refused(home: Path) -> None:
    tidy(home)
    for value in ("1e308", "1e12", "inf", "nan", "-1"):
        ended = command("run", DATA, f"--total-epochs={value}")
        assert ended.code == 2 and "total_epochs" in ended.err.replace("-", "_") and len(ended.err.splitlines()) == 1, value
    for words in (("compare",), ("sweep", "--lr", "0.1")):
        ended = command(*words, DATA, "--methods", "fedavg", "--seeds", str(10**18))
        assert ended.code == 2 and "at most 10000" in ended.err, words


def test_the_tests_are_where_they_think(home: Path) -> None:
    assert Path(os.getcwd()) == home
