"""TorchX component: one launcher of Bagua on each of several machines, on any scheduler of TorchX.

torchx run -s slurm deploy/torchx_component.py:bagua -j 2x4 --script examples/digits.py -- --algorithm bytegrad
"""

# TorchX reads the types of the parameters: no `from __future__ import annotations` here, and none with `|`.
import re
import shlex

from torchx import specs  # pyright: ignore[reportMissingImports]


def bagua(
    *script_args: str,
    script: str,
    j: str = "1x2",
    image: str = "registry.example.com/bagua:cpu",
    name: str = "bagua",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,
    h: str = "",
    max_restarts: int = 0,
    rdzv_port: int = 29500,
) -> specs.AppDef:
    """Starts a script with `bagua run` on all machines of a job.

    Args:
        script_args: arguments of the script
        script: path of the script in the image
        j: machines x ranks on each, as 2x4; 2:4x4 goes on with two to four machines (elastic training)
        image: image with Bagua and the script
        name: name of the job
        cpu: CPU cores of a machine
        gpu: GPUs of a machine
        memMB: memory of a machine in MB
        h: a named resource in place of cpu, gpu and memMB
        max_restarts: times that the ranks are started again after a failure
        rdzv_port: port of the rendezvous on the first machine
    """
    parts = re.fullmatch(r"(?:(?:(\d+):)?(\d+)x)?(\d+)", j)
    if parts is None:
        raise ValueError(f"j: expected MACHINESxRANKS or LEAST:MOSTxRANKS, got {j!r}")
    most, ranks = parts[2] or "1", parts[3]
    least = parts[1] or most
    machines = f"{least}:{most}" if parts[1] else most
    words = ["bagua", "run", "--nnodes", machines, "--nproc-per-node", ranks]
    words += ["--max-restarts", str(max_restarts), "--rdzv-backend", "c10d", "--rdzv-id", specs.macros.app_id]
    # TorchX puts the name of a variable in place of the macro, and $$ becomes $. The first machine may lack it.
    endpoint = f'"$${{{specs.macros.rank0_env}:=localhost}}:{rdzv_port}"'
    line = f"{shlex.join(words)} --rdzv-endpoint {endpoint} {shlex.join([script, *script_args])}"
    role = specs.Role(
        name="trainer",
        image=image,
        entrypoint="bash",
        args=["-c", line],
        num_replicas=int(most),
        min_replicas=int(least),
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h or None),
        port_map={"c10d": rdzv_port},
    )
    return specs.AppDef(name=name, roles=[role])
