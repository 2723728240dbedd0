"""The process of one contender: prepares once, then runs rounds on request. Started by bench_speed.py; see turns.py."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import signal

from contenders import CONTENDERS
from turns import CannotTakePart, Turns

ON_DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of Linux: a driver that is killed must not leave sleeping contenders behind."""


def main() -> None:
    ctypes.CDLL(None).prctl(ON_DEATH_OF_PARENT, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("contender")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    turns = Turns.on_standard_output(options.rounds)
    contender = CONTENDERS[options.contender]
    try:
        import torch

        torch.set_num_threads(contender.threads)
        from works import chosen

        importlib.import_module(contender.side).run(chosen(options.work, options.quick), contender, turns)
    except (CannotTakePart, ModuleNotFoundError) as error:
        turns.say({"missing": str(error)})
    except Exception as error:
        turns.say({"failed": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
