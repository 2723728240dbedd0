"""A ready Flower app folder for a recipe: what ``flwr run`` packs and sends to the SuperLink.

The folder holds no code of its own: server and nodes run the apps that come with polyfed, which must be installed on every machine.
The settings travel as JSON text in the run's configuration, under ``polyfed-settings``. Files of methods of one's own (``load``)
are copied into the folder, hence travel too; Flower puts the folder on ``sys.path`` where it runs.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from polyfed.errors import SettingError
from polyfed.flower.new_files import refuse_existing, writing_to
from polyfed.flower.run_config import DEFAULTS, SETTINGS_KEY, settings_text
from polyfed.settings import Settings

SERVER_APP, CLIENT_APP = "polyfed.flower.server_app:app", "polyfed.flower.client_app:app"
PROJECT, RECIPE, README = "pyproject.toml", "recipe.toml", "README.md"
ALWAYS_WRITTEN = ("data", "method", "rounds")
LONGEST_NAME = 32
# Flower leaves files of these names out of what it sends.
NEVER_SENT = re.compile(r"test_.*\.py|.*_test\.py")


def write_app(folder: Path, settings: Settings, name: str, server_app: str = SERVER_APP) -> list[Path]:
    """Write the app folder; nothing that exists is overwritten.

    Args:
        folder: made if it does not exist.
        settings: of the run.
        name: what the recipe is called.
        server_app: the ServerApp that runs it.

    Returns:
        The files written.
    """
    own = own_files(settings.load)
    refuse_existing(folder, [PROJECT, RECIPE, README, *own], "nothing is overwritten. Name another folder.")
    travelling = dataclasses.replace(settings, load=tuple(own))
    texts = {
        PROJECT: project_text(travelling, name, server_app),
        RECIPE: recipe_text(travelling, name),
        README: readme_text(name),
    }
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        for file, source in own.items():
            shutil.copyfile(source, folder / file)
    return [folder / file for file in (*texts, *own)]


def own_files(load: Sequence[str]) -> dict[str, Path]:
    """Files of methods of one's own, by the name they travel under."""
    found: dict[str, Path] = {}
    for text in load:
        file = Path(text)
        if not file.is_file():
            raise SettingError(f"There is no file {text} to load methods from.")
        if file.suffix != ".py" or NEVER_SENT.fullmatch(file.name):
            raise SettingError(f"Flower would not send {file.name} to the nodes. Give it a name like my_method.py.")
        if file.name in found:
            raise SettingError(f"Two files to load are called {file.name}. Give one of them another name.")
        found[file.name] = file
    return found


def project_text(settings: Settings, name: str, server_app: str = SERVER_APP) -> str:
    """``pyproject.toml`` as Flower wants it. polyfed is no dependency: Flower would try to install it for each run."""
    document = {
        "project": {
            "name": app_name(name),
            "version": "1.0.0",
            "description": f"polyfed over Flower: {name}",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "polyfed",
                    "components": {"serverapp": server_app, "clientapp": CLIENT_APP},
                    "config": {SETTINGS_KEY: settings_text(settings), **DEFAULTS},
                }
            }
        },
    }
    return tomli_w.dumps(document)


def recipe_text(settings: Settings, name: str) -> str:
    """The settings that are not at their defaults as a recipe, to read, and to make the folder again from."""
    plain = {item.name: item.default for item in dataclasses.fields(Settings) if item.name not in ALWAYS_WRITTEN}
    written = {key: value for key, value in dataclasses.asdict(settings).items() if key not in plain or value != plain[key]}
    if settings.total_epochs is not None:
        written.pop("rounds")
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in written.items()}
    document = {"title": f"{name}, as deployed", "settings": values}
    return f"# polyfed run --recipe {RECIPE}\n" + tomli_w.dumps(document)


def app_name(name: str) -> str:
    """A name Flower takes for an app.

    >>> app_name("fedwon/table-1-digits-fedbn"), app_name("./My recipe.toml")
    ('table-1-digits-fedbn', 'my-recipe')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", Path(name).name.removesuffix(".toml").lower()).strip("-")
    return plain[:LONGEST_NAME].strip("-") or "polyfed-app"


def readme_text(name: str) -> str:
    """How to start everything, word by word."""
    return README_TEXT.replace("NAME", app_name(name))


README_TEXT = """\
# NAME over Flower

This folder is a Flower app. `flwr run` sends it to the SuperLink, which hands it to the SuperNodes. It holds settings only:
polyfed with its flower extra (`pip install 'polyfed[flower]'`) must be installed on every machine, in the same version.

* `pyproject.toml`: the app; the settings are the JSON text `polyfed-settings`.
* `recipe.toml`: the same settings, to read. To change them: `polyfed deploy init ANOTHER_DIR --recipe recipe.toml --set rounds=50`.

The commands below start three nodes on one machine. Run them in this folder, each block in a terminal of its own, with the Python
environment of polyfed active: Flower looks for its own programs on the `PATH`.

## 1. Certificates and keys (for trials)

```
polyfed deploy certs ../certificates --nodes 3
```

If nodes run on other machines, add the name by which they reach this one: `--host fl.example.org`.

## 2. The server

```
export FLWR_TELEMETRY_ENABLED=0 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
flower-superlink --host 127.0.0.1 --port 8000 \\
  --ssl-ca-certfile ../certificates/ca.crt --ssl-certfile ../certificates/server.crt --ssl-keyfile ../certificates/server.key \\
  --enable-supernode-auth --disable-runtime-dependency-installation
```

For nodes on other machines say `--host 0.0.0.0`.

## 3. Tell `flwr` where the server is, and the server which nodes may come in

```
mkdir -p ~/.flwr
grep -qsF '[superlink.trial]' ~/.flwr/config.toml || cat >> ~/.flwr/config.toml <<END

[superlink.trial]
address = "127.0.0.1:8000"
root-certificates = "$(realpath ../certificates/ca.crt)"
END
flwr supernode register ../certificates/node-1.pub trial
flwr supernode register ../certificates/node-2.pub trial
flwr supernode register ../certificates/node-3.pub trial
```

## 4. The nodes

Each node says in `--node-config` where its data are and which domain they are. The data stay where they are. For node 1:

```
export FLWR_TELEMETRY_ENABLED=0 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1 FLWR_HOME=$HOME/.flwr-node-1
flower-supernode --superlink 127.0.0.1:8000 --root-certificates ../certificates/ca.crt \\
  --auth-supernode-private-key ../certificates/node-1 --host 127.0.0.1 --port 9094 \\
  --node-config 'data="/srv/images" domain="sketch"'
```

The others have their own number in `FLWR_HOME` and the key, their own data and domain, and, on the same machine, their own port.

## 5. The run

```
flwr run . trial --stream --run-config 'min-nodes=3'
```

The log ends with the accuracy of each domain and the run folder, which is on the server, in `runs/` where `flower-superlink` was started.
`flwr list trial` shows how runs stand, `flwr stop RUN_ID trial` ends one. `--run-config` may also say:

* `min-nodes=3 wait=600.0`: how many nodes the run waits for, and for how many seconds at most;
* `timeout=3600.0`: how many seconds a node may take to answer an ask;
* `patience=120.0`: how many seconds a node that has gone is waited for;
* `describe-timeout=300.0`: how many seconds a node may take to describe itself;
* `unseen-data="/srv/unseen"`: images on the server, on whose domains the newcomer's model is tested;
* `newcomer-model=true`: at the end, ask the nodes once for the layers that stayed local, so that the run folder has a model for newcomers;
* `out="/srv/runs/trial"`: the run folder; if it holds a run with the same settings, that run goes on.
"""
