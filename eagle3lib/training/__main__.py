"""``torchrun -m eagle3lib.training JOB.json``: one rank of a training job (see ``job.py``).

Any torchrun may start it, on one node or many, as long as all see the folders of the job; on one
device ``python -m eagle3lib.training JOB.json`` does. The last line says whether it is finished.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.machine import keep_freed_memory
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.folder import open_target
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.loop import Trainer


def main() -> int:
    job = read_json(Path(sys.argv[1]))
    torch.set_num_threads(int(job["threads"]))
    if not torch.cuda.is_available():
        keep_freed_memory()
    names = ("phase", "states", "vocab", "answers")
    folders = Folders(*(Path(job[name]) for name in names if name in job))
    try:
        cfg = TrainParams.checked(job["params"], sys.argv[1])
        trainer = Trainer(cfg, open_target(cfg.target), folders)
        finished = trainer.run()
    except UserError as error:
        print(f"USER ERROR\n{error}", file=sys.stderr, flush=True)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if trainer.place.rank == 0:
        at = f"update {trainer.at.update} of {trainer.at.updates}"
        print("finished" if finished else f"not finished: {at}, run the same command again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
