#!/bin/bash
# SLURM: two nodes with two ranks each, which srun starts itself. sbatch deploy/slurm.sh
#SBATCH --job-name=bagua-digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
# With GPUs, one for each rank:
##SBATCH --gpus-per-node=2
set -euo pipefail

# An environment that all nodes see, with Bagua in it; unset, what is on the path is used.
if [ -n "${VIRTUAL_ENV:-}" ]; then
    export PATH="$VIRTUAL_ENV/bin:$PATH"
fi
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

# bagua.init_process_group reads rank, number of ranks, address and port from the variables of srun. The step ends if a
# rank fails.
srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" python "${1:-examples/digits.py}" "${@:2}"
