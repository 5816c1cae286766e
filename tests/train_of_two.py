"""One of two processes of the training example, which kills itself before the batch of a step, if it is told one."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import train_gpt
from gpt import launch
from gpt.corpus import Corpus

DIES_AT, ARGUMENTS = int(sys.argv[1]), sys.argv[2:]


def batch(corpus, *args, made=Corpus.batch):
    if args[-1] == DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    return made(corpus, *args)


launch.SILENT_S = 5  # the other one dies soon
if DIES_AT:
    Corpus.batch = batch
sys.exit(train_gpt.run(ARGUMENTS))
