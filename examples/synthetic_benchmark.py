"""Images per second of VGG-16, ResNet-50 or BERT-Large on made-up data, with the flags of the original's benchmark.

python examples/synthetic_benchmark.py --model resnet50 --scale 0.25 --image-size 64             one process, a minute
bagua run --nproc-per-node 2 examples/synthetic_benchmark.py --model vgg16 --scale 0.125 --image-size 64
bagua run --nproc-per-node 8 examples/synthetic_benchmark.py --model bert_large --amp --algorithm bytegrad    on 8 GPUs

It is `bagua_sys_perf`, which a pip-installed Bagua has as a command.
"""

from __future__ import annotations

import sys

from bagua.sys_perf.main import main

if __name__ == "__main__":
    sys.exit(main(prog="synthetic_benchmark.py"))
