"""``polyfed deploy``: certificates that verify, private files that are private, and an app folder that Flower takes."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.paths import DOCS
from polyfed.cli.main import app
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError
from polyfed.flower.app_folder import PROJECT, README, RECIPE, write_app
from polyfed.flower.run_config import DEFAULTS, SETTINGS_KEY, settings_from, settings_text
from polyfed.recipes import read
from polyfed.settings import Settings, with_changes
from polyfed.text import read_call

WITHOUT = "needs the flower extra: pip install 'polyfed[flower]'"
OWN_METHOD = """
import polyfed


@polyfed.register
def quiet_one():
    '''Does nothing of its own.'''
    return polyfed.Method("quiet_one")
"""


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, " ".join(result.output.split())


def config_of(folder: Path) -> dict[str, object]:
    with (folder / PROJECT).open("rb") as file:
        document = tomllib.load(file)
    config = document["tool"]["flwr"]["app"]["config"]
    assert isinstance(config, dict)
    return config


# ------------------------------------------------------------------------------------------------------- certificates
@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cryptography", reason=WITHOUT)
    from polyfed.flower.certificates import make_certificates

    folder = tmp_path_factory.mktemp("deploy") / "certificates"
    make_certificates(folder, nodes=2, hosts=["fl.example.org", "10.1.2.3", "localhost"], days=7)
    return folder


def test_the_server_certificate_verifies_for_its_names_only(made: Path) -> None:
    from cryptography import x509
    from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

    authority, server = (x509.load_pem_x509_certificate((made / name).read_bytes()) for name in ("ca.crt", "server.crt"))
    builder = PolicyBuilder().store(Store([authority]))
    names = [x509.DNSName("localhost"), x509.DNSName("fl.example.org")]
    names += [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "10.1.2.3")]
    for name in names:
        assert builder.build_server_verifier(name).verify(server, []) == [server, authority]
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("elsewhere.example.org")).verify(server, [])
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=8)
    with pytest.raises(VerificationError):
        builder.time(later).build_server_verifier(names[0]).verify(server, [])


def test_a_server_certificate_of_another_authority_does_not_verify(made: Path, tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

    from polyfed.flower.certificates import make_certificates

    make_certificates(tmp_path, nodes=1)
    stranger = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((made / "ca.crt").read_bytes())
    with pytest.raises(VerificationError):
        PolicyBuilder().store(Store([authority])).build_server_verifier(x509.DNSName("localhost")).verify(stranger, [])


def test_a_server_with_these_files_is_trusted_by_python_itself(made: Path) -> None:
    """A handshake in memory, with the strict checks that Python 3.13 makes by default."""
    import ssl

    client, server = ssl.create_default_context(cafile=str(made / "ca.crt")), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server.load_cert_chain(made / "server.crt", made / "server.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[object] = set()
    for _ in range(10):
        for side in (near, far):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert done == {near, far}


def test_node_keys_are_what_flower_reads(made: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    publics = set()
    for node in ("node-1", "node-2"):
        private = serialization.load_ssh_private_key((made / node).read_bytes(), None)
        public = serialization.load_ssh_public_key((made / f"{node}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(public, ec.EllipticCurvePublicKey)
        assert private.curve.name == "secp384r1" and private.public_key() == public
        publics.add((made / f"{node}.pub").read_bytes())
    assert len(publics) == 2
    pytest.importorskip("flwr", reason=WITHOUT)
    from flwr.cli.supernode.register import try_load_public_key

    assert try_load_public_key(made / "node-1.pub")


def test_private_files_are_private(made: Path) -> None:
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in made.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"ca.key", "server.key", "node-1", "node-2"}
    assert {name for name, mode in modes.items() if mode == 0o644} == {"ca.crt", "server.crt", "node-1.pub", "node-2.pub"}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_keys_are_never_overwritten_and_no_half_set_is_left(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason=WITHOUT)
    from polyfed.flower.certificates import make_certificates

    (tmp_path / "node-2").write_text("mine")
    with pytest.raises(SettingError, match=r"already holds node-2, and keys are never overwritten"):
        make_certificates(tmp_path, nodes=2)
    assert [file.name for file in tmp_path.iterdir()] == ["node-2"] and (tmp_path / "node-2").read_text() == "mine"


def test_the_command_says_that_certificates_are_for_trials(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    code, said = run("deploy", "certs", str(tmp_path / "c"), "--nodes", "1", "--host", "fl.example.org", "--days", "5")
    assert code == 0 and "For trials, valid for 5 days" in said and "fl.example.org" in said
    code, said = run("deploy", "certs", str(tmp_path / "c"), "--nodes", "1")
    assert code == 2 and "never overwritten" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "0"], "--nodes must be at least 1, found 0."),
        (["--nodes", "1", "--days", "0"], "--days must be at least 1, found 0."),
        (["--nodes", "1", "--host", "https://fl.example.org:8000"], "without scheme and port"),
    ],
)
def test_what_cannot_be_certified_is_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    code, said = run("deploy", "certs", str(tmp_path / "c"), *words)
    assert code == 2 and sentence in said and not (tmp_path / "c").exists()


# ------------------------------------------------------------------------------------------------------ the app folder
def test_the_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = with_changes(
        Settings(), {"method": "fedbn + agc(clip=1.28)", "unseen": ("street", "a \"b\" 'c'"), "lr": 0.1, "clients_per_round": 2}
    )
    write_app(tmp_path / "app", settings, "mine")
    assert settings_from(config_of(tmp_path / "app")) == settings
    written = read(str(tmp_path / "app" / RECIPE)).values
    assert with_changes(Settings(), written) == settings


def test_a_budget_in_epochs_survives_as_a_recipe(tmp_path: Path) -> None:
    settings = with_changes(Settings(), {"total_epochs": 7.0})
    write_app(tmp_path / "app", settings, "mine")
    assert with_changes(Settings(), read(str(tmp_path / "app" / RECIPE)).values) == settings


def test_files_of_ones_own_methods_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quiet.py").write_text(OWN_METHOD)
    settings = with_changes(Settings(), {"load": (str(tmp_path / "quiet.py"),)})
    write_app(tmp_path / "app", settings, "mine")
    assert (tmp_path / "app" / "quiet.py").read_text() == OWN_METHOD
    config = config_of(tmp_path / "app")
    with pytest.raises(SettingError, match=r"holds no quiet\.py"):
        settings_from(config)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "app"), *sys.path])
    assert settings_from(config).load == (str(tmp_path / "app" / "quiet.py"),)


@pytest.mark.parametrize(("name", "sentence"), [("test_quiet.py", "would not send"), ("quiet.txt", "would not send")])
def test_a_file_flower_would_leave_out_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / name).write_text(OWN_METHOD)
    with pytest.raises(SettingError, match=sentence):
        write_app(tmp_path / "app", with_changes(Settings(), {"load": (str(tmp_path / name),)}), "mine")
    assert not (tmp_path / "app").exists()


# Inside flwr 1.41, which calls pathspec by an old name.
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_takes_the_folder_and_packs_what_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import validate_config

    code, said = run("deploy", "init", str(tmp_path / "app"), "--recipe", "demo", "--set", "rounds=3", "--set", "batch-size=8")
    assert code == 0 and str(tmp_path / "app" / README).replace("\n", "") in said.replace(" ", "")
    with (tmp_path / "app" / PROJECT).open("rb") as file:
        document = tomllib.load(file)
    assert document["project"]["dependencies"] == []
    usable, errors, warnings = validate_config(document, check_module=False)
    assert (usable, errors, warnings) == (True, [], [])
    packed = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path / "app"))).namelist()
    assert {PROJECT, RECIPE, README} <= set(packed)
    config = document["tool"]["flwr"]["app"]["config"]
    assert set(DEFAULTS) < set(config), "flwr run --run-config changes only keys that are there"
    settings = settings_from(config)
    assert (settings.method, settings.rounds, settings.batch_size) == ("fedbn", 3, 8)
    code, said = run("deploy", "init", str(tmp_path / "app"), "--recipe", "demo")
    assert code == 2 and "nothing is overwritten" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--recipe", "demoo"], "Did you mean demo?"),
        (["--recipe", "demo", "--set", "method=fedbm"], "There is no method called 'fedbm'. Did you mean fedbn?"),
        (["--recipe", "demo", "--set", "round=3"], "There is no setting 'round'. Did you mean rounds?"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_anything_is_written(tmp_path: Path, words: list[str], sentence: str) -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    code, said = run("deploy", "init", str(tmp_path / "app"), *words)
    assert code == 2 and sentence in said and not (tmp_path / "app").exists()


def test_a_run_without_settings_says_how_to_make_the_folder() -> None:
    with pytest.raises(SettingError, match=r"no polyfed-settings. Make the app folder with: polyfed deploy init"):
        settings_from({})
    with pytest.raises(SettingError, match="is not JSON"):
        settings_from({SETTINGS_KEY: "{"})
    with pytest.raises(SettingError, match="There is no setting 'colour'"):
        settings_from({SETTINGS_KEY: settings_text(Settings()).replace('"seed"', '"colour"')})


# ------------------------------------------------------------------------------------------------------- without Flower
@pytest.mark.parametrize("words", [["init", "DIR", "--recipe", "demo"], ["certs", "DIR", "--nodes", "1"]])
def test_without_flower_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("polyfed.cli.deploy.find_spec", lambda name: None)
    code, said = run("deploy", *(str(tmp_path / "new") if word == "DIR" else word for word in words))
    assert code == 2 and said.endswith("Install it with: pip install 'polyfed[flower]'") and not (tmp_path / "new").exists()


def test_help_of_the_command_imports_nothing_heavy() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from polyfed.cli.main import app; "
        "assert CliRunner().invoke(app, ['deploy', 'init', '--help']).exit_code == 0; "
        "print([name for name in ('torch', 'flwr', 'cryptography') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_model_of_ones_own_travels_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\n\ndef build(classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"
    Path("my_net.py").write_text(text)
    words = ["--recipe", "demo", "--set", "load=my_net.py", "--set", "model=my_net:build"]
    code, said = run("deploy", "init", "app", *words)
    assert code == 0, said
    assert Path("app", "my_net.py").read_text() == text
    assert hashlib.sha256(text.encode()).hexdigest() in said
    assert config_of(Path("app"))[SETTINGS_KEY]


@pytest.mark.parametrize("page", ["docs", "app"])
def test_telling_flwr_where_the_server_is_may_be_repeated(page: str, tmp_path: Path) -> None:
    """It wrote the same table twice, which is no TOML."""
    write_app(tmp_path / "app", Settings(), "demo")
    text = ((DOCS / "own-superlink.md") if page == "docs" else (tmp_path / "app" / README)).read_text()
    begin = text.index("mkdir -p ~/.flwr")
    block = text[begin : text.index("\nEND\n", begin) + len("\nEND\n")]
    for _ in range(2):
        subprocess.run(["bash", "-euc", block], check=True, cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    told = tomllib.loads((tmp_path / ".flwr" / "config.toml").read_text())
    assert told["superlink"]["trial"]["address"] == "127.0.0.1:8000"


def test_options_of_an_image_folder_reach_a_node_as_the_page_writes_them() -> None:
    config = pytest.importorskip("flwr.common.config", reason=WITHOUT)
    text = (DOCS / "own-superlink.md").read_text()
    (line,) = [line.strip() for line in text.splitlines() if "image_folder(" in line and "--node-config" in line]
    _, written = shlex.split(line)
    told = config.parse_config_args([written], flatten=False)
    assert told["domain"] == "sketch"
    call = read_call(told["data"])
    assert call.named["root"] == "/srv/images"
    assert set(call.named) <= set(data_sets.find("image_folder").signature.parameters)
