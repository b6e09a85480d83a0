"""One rank of a training: ``train_worker.py JOBS OUTPUT`` runs pickled jobs one after the other and saves what each
ended with on this rank."""

import os
import sys

import torch

if __name__ == "__main__":
    jobs_file, output = sys.argv[1:]
    torch.set_num_threads(1)
    outcomes = {name: job.run() for name, job in torch.load(jobs_file, weights_only=False).items()}
    torch.save(outcomes, f"{output}/rank{os.environ['RANK']}.pt")
