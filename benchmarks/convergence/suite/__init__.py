"""A convergence suite on data drawn from a seed: every algorithm at its defaults, beside the settings of the docs.

    python -m benchmarks.convergence.suite [--json FILE [--resume]] [--minutes M] [--quick] [--only NAMES]
        [--tasks NAMES] [--seeds 100,101,102] [--rate F] [--workers N]

Four tasks on 4 ranks, 512 steps each: a convolutional net and a regression with heavy tails, both with SGD and
momentum; a GPT on bytes of source code and a small vision transformer, both with AdamW, LAMB or Muon. The seed draws
what is to be learned, the samples and the initial weights. Seeds below 100 are for choosing: learning rates, sizes and
defaults of the library. Seeds from 100 on are for judging: nothing may be chosen on them.

All runs of a family of optimizers have the same data in the same order, the same initial weights, learning rates and
schedule (warm-up, then half a cosine). Algorithms have their defaults but for what a row names. The two-stage
optimizers have the defaults of their own policies, with decoupled weight decay. The baseline of a family is
gradient_allreduce, which computes what DistributedDataParallel does; rows "torch DDP" run that in processes.

Each figure is a percentage of held-out loss above the baseline's on the same seed; positive is worse.

- Equal steps: the final loss of the mean of all ranks' weights, and that of the ranks' own weights, their mean.
- Equal bytes: against the baseline trained with as many bytes. The baseline is run with 1/2, 1/4, ... 1/64 of the
  steps, each with a schedule of its own; between those the loss is interpolated over the logarithm of the steps.
  A run that sent less than 1/64 of the baseline's bytes is compared with 1/64; one that sent more, with the whole.
- Equal time: the same with the time of the run on four hosts and links of 100 Mbit/s, 5 ms of compute a step. Step
  times are predicted by `bagua plan` for the same algorithm, options and model, and not measured. A row whose bytes
  are not those that were predicted, to 10 %, has none; nor has "async", whose loss depends on the time of a step.

Controls are the baseline on the same task with other samples, several times for each seed: how far apart two runs are
that differ in nothing else. A gap has to exceed that.

The target at equal steps is 2 % of loss for synchronous algorithms and 4 % for others, as the mean over the seeds.

Runs are made one seed after another, first baselines and defaults, then baselines with fewer steps, then settings, then
what runs in processes, at last the controls. `--resume` adds to the file what it lacks; the table says how many seeds
each row has.
"""
