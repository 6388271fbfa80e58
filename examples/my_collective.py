"""A collective of your own, checked and run: a ring all_reduce that goes both ways at once.

undertow run -n 4 --device cpu examples/my_collective.py
undertow collective check examples/my_collective.py --ranks 8
"""

import torch

import undertow as ut
from undertow import collective as co


@co.program("all_reduce", chunks=lambda ranks: 2 * ranks)
def two_way_ring(c):
    """Even chunks travel to the right, odd ones to the left; each way has a worker of its own."""
    for chunk in range(2 * c.ranks):
        way = 1 if chunk % 2 == 0 else -1
        here = c.rank(chunk // 2)
        total = here.input[chunk].copy(here.output[chunk], channel=chunk % 2)
        for step in range(1, c.ranks):
            there = c.rank((chunk // 2 + way * step) % c.ranks)
            total = there.input[chunk].copy(there.output[chunk], channel=chunk % 2).reduce(total, channel=chunk % 2)
        for _ in range(c.ranks - 1):
            total = total.copy((total.rank + way) % c.ranks, channel=chunk % 2)


def main() -> None:
    group = ut.init()
    tensor = torch.full((1000,), float(group.rank + 1))
    co.all_reduce(tensor, program=two_way_ring)
    if group.rank == 0:
        print(f"{tensor[0]:g} everywhere: {bool((tensor == tensor[0]).all())}")
    ut.shutdown()


if __name__ == "__main__":
    main()
