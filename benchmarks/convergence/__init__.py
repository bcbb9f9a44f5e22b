"""What the algorithms do to convergence, beside torch's DistributedDataParallel.

    python -m benchmarks.convergence [--quick] [--json FILE] [--plots DIR] [--only NAMES] [--merge FILE]

Two small tasks, handwritten digits and characters of a text, on 4 ranks with 3 seeds. Within a family of optimizers
(SGD with momentum, Adam, LAMB) all configurations have the same data in the same order, the same number of steps, the
same initial weights and the same learning rates; those were fixed with plain training alone, some way below where it
becomes unstable. Optimizers with two stages spend a fifth of the steps in the exact one. Bytes are those of whole
runs, stages in full precision included, divided by the steps.

DDP is torch's own, in 4 processes over gloo, and so is "async", whose result depends on time. All others run in
`bagua.simulate`, deterministically. The row "gradient_allreduce" shows that the two ways of running agree.

A configuration is within its target if its mean over seeds is worse than DDP's by at most 0.5 points of accuracy
(digits) and 2 % of loss (char_lm); 1 point and 4 % for decentralized, local and asynchronous ones, for which the mean
of all ranks' weights counts. Rank 0's result is given too.

After a change only what it concerns need run again: `--only one_bit_lamb --merge earlier/results.json` takes all other
runs from there. Where the algorithm is right and a row misses all the same, docs/algorithms.md says why.
"""
