"""A script that trains by a plan with delay and saves every rank's state; DIES_AT in the environment: in its first life
rank 1 is killed in that step, when its gradients have been pushed and the weights have not been pulled.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from delay_checks import Net, net_loss, plan_of

import runtime
from runtime.plan import DelaySpec

STEPS, SAVE_EVERY = 20, 4


def last_saved(folder: Path) -> int:
    """The last step that every rank has saved; 0: none."""
    steps = [
        {int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{r}-*.pt")} for r in range(dist.get_world_size())
    ]
    return max(set.intersection(*steps), default=0)


def main(folder: Path) -> None:
    """Trains, from the last checkpoint on where there is one."""
    rank = int(os.environ["RANK"])
    # A store of this life's own: in torchrun's a rank may find the address that another one had before it died.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if "DIES_AT" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, so that the other one lives to see the error
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    plan = plan_of(model, DelaySpec(steps=2, warmup_steps=6), 2)
    session = runtime.attach(model, optimizer, plan, timeout_s=10.0, drift=False)
    begun = last_saved(folder)
    dist.barrier()
    if begun:
        saved = torch.load(folder / f"{rank}-{begun}.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
        print(f"rank {rank} goes on after step {begun}", flush=True)
    for step in range(begun, STEPS):
        optimizer.zero_grad()
        net_loss(model, rank, step).backward()
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_life and rank == 1 and step == int(os.environ.get("DIES_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
            part = folder / f"{rank}.part"
            torch.save(state, part)
            part.replace(folder / f"{rank}-{step + 1}.pt")
    own = [p.detach().clone() for p in model.parameters()]
    with session.global_weights():
        torch.save({"own": own, "global": [p.detach().clone() for p in model.parameters()]}, folder / f"end{rank}.pt")
    session.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
