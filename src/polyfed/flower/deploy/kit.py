"""The kit, a small file with which a node joins: the server's address, the authority's certificate and a one-time token."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from polyfed.errors import SettingError
from polyfed.flower.deploy.private_files import write_private

SUFFIX = ".kit"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True)
class Kit:
    name: str
    host: str
    port: int
    token: str
    authority: str

    def write(self, path: Path) -> None:
        write_private(path, f"# polyfed join {path.name} --data DIR --domain NAME\n" + tomli_w.dumps(vars(self)))

    @classmethod
    def read(cls, path: Path) -> Kit:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise SettingError(f"Kit not found: {path}. Kits are created by: polyfed serve RECIPE --host NAME --nodes 3") from error
        except (OSError, ValueError) as error:
            raise SettingError(f"{path} is not a kit ({error}).") from error
        kinds = {"name": str, "host": str, "port": int, "token": str, "authority": str}
        wrong = [name for name, kind in kinds.items() if type(values.get(name)) is not kind]
        if wrong or not NAME.fullmatch(values["name"]):
            raise SettingError(f"{path} is not a valid kit: {', '.join(wrong) or 'name'} is missing or invalid.")
        return cls(**{name: values[name] for name in kinds})
