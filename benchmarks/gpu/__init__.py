"""Everything that needs a device, in one command; without a device, the rehearsal of it on the CPU.

    python -m benchmarks.gpu --minutes 30                  # as `make gpu`
    python -m benchmarks.gpu --minutes 30 --wheels FOLDER  # offline: makes an environment of the wheels in a folder
    python -m benchmarks.gpu --only selection wire         # some parts (`parts.py` has them all)

Parts run in a process of their own, which is started anew behind one that failed. What is finished is kept in
build/gpu, and the same command goes on behind it; `--anew` begins again. The page, docs/results/gpu.md, is written at
the end and whenever the time is up. Exit code 0: every part is done and good; 1: a part failed; 4: the time was up.
"""
