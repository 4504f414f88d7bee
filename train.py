"""Train: compose the configuration, check all of it, then run.

python train.py [key=value ...]                               one process
torchrun --nproc-per-node N train.py [key=value ...]          N on this host (or srun python train.py under Slurm)
python train.py --help                                        every key

The story goes on in trainer.py.
"""

from __future__ import annotations

import sys

from conf import entry
from conf.schema import Config


def main(argv: list[str] | None = None) -> int:
    """Command line to exit code; a refusal is a message, never a traceback."""
    return entry.main(run, argv, program="train.py")


def run(config: Config, overrides: list[str]) -> int:
    """One start of the run that `config` describes."""
    import trainer  # not before: it takes torch seconds to load, for which a refusal need not wait

    return trainer.run(config, overrides)


if __name__ == "__main__":
    sys.exit(main())
