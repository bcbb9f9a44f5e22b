"""Jobs for ranks: a loop written with Accelerate, with Bagua or with DDP."""

# pyright: reportMissingImports=false
from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import bagua
from bagua.interop.accelerate import BaguaAccelerator
from tests.interop.fresh_state import as_launched
from tests.interop.tiny_models import Sentences, tiny_bert, tiny_llama
from tests.interop.trainer_runs import OPTIMIZERS, OPTIONS, flat, gathered, heard

STEPS = 6


class Loop:
    """The loop of a script; torch's DDP without an `algorithm`."""

    def __init__(self, algorithm: str | None, options: dict[str, Any] | None = None, seed: int = 0, **settings: Any):
        given = {"cpu": True, "gradient_accumulation_steps": 2, **settings}
        self.accelerator: Any = (
            Accelerator(**given)
            if algorithm is None
            else BaguaAccelerator(
                algorithm=algorithm, bagua_options={**OPTIONS.get(algorithm, {}), **(options or {})}, **given
            )
        )
        model = tiny_bert(seed)
        make = OPTIMIZERS.get(algorithm or "", lambda params: torch.optim.AdamW(params, lr=0.01))
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4 * STEPS)
        loader = DataLoader(Sentences(), batch_size=4)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, steps: int, skip: int = 0) -> None:
        """Train `steps` steps, after batches that were seen before."""
        accelerator, done, batches = self.accelerator, 0, chain.from_iterable(repeat(self.loader))
        for _ in range(2 * skip):
            next(batches)
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                    self.losses.append(float(loss.detach()))
                    done += 1
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if done == steps:
                return


def train(algorithm: str | None, settings: dict[str, Any]) -> Any:
    """Train; returns what happened."""
    with as_launched():
        loop = Loop(algorithm, **settings)
        loop.run(STEPS)
        stats = bagua.stats(loop.model) if algorithm is not None else None
        return {
            "losses": loop.losses,
            "norms": loop.norms,
            "rates": loop.scheduler.get_last_lr(),
            "wrapped": type(loop.model).__name__,
            "weights": flat(loop.model),
            "bytes": 0 if stats is None else stats.total.bytes_sent,
            "steps": 0 if stats is None else stats.steps,
        }


def resume(out: str, algorithm: str, options: dict[str, Any]) -> Any:
    """Train, save half way and go on; then again from there, in new objects. Returns both losses."""
    with as_launched():
        loop = Loop(algorithm, options)
        loop.run(3)
        loop.accelerator.save_state(out)
        saved = load_file(f"{out}/model.safetensors")
        same = all(torch.equal(saved[name], value) for name, value in loop.model.state_dict().items() if name in saved)
        complete = set(saved) == set(loop.model.state_dict())
        loop.run(3, skip=3)
        through = loop.losses[3:]
        loop.accelerator.free_memory()
    with as_launched():
        loop = Loop(algorithm, options, seed=5)
        loop.accelerator.load_state(out)
        loop.run(3, skip=3)
        return {"through": through, "again": loop.losses, "same": same, "complete": complete}


def load_in_the_middle(out: str) -> Any:
    """Train on from a checkpoint without Bagua's state, in the course of a training with it."""
    with as_launched():
        loop = Loop(None)
        loop.run(2)
        loop.accelerator.save_state(out)
        weights = flat(loop.model)
    with as_launched(), heard() as messages:
        loop = Loop("diloco", {"communication_interval": 100})
        loop.run(3)
        loop.accelerator.load_state(out)
        loaded = flat(loop.model)
        loop.run(1)
        return {"messages": messages, "same": torch.equal(weights, loaded), "ranks": gathered(loaded)}


def one_by_one() -> Any:
    """The model is prepared before there is an optimizer; and one model is for evaluation only."""
    with as_launched():
        accelerator = BaguaAccelerator(cpu=True, algorithm="bytegrad")
        model, frozen = tiny_bert(), tiny_bert(seed=1)
        for param in frozen.parameters():
            param.requires_grad_(False)
        prepared = accelerator.prepare(model)
        teacher, other = accelerator.prepare(frozen), accelerator.prepare_model(tiny_bert(2), evaluation_mode=True)
        optimizer = accelerator.prepare(torch.optim.SGD(prepared.parameters(), lr=0.1))
        batch = {name: value[None] for name, value in Sentences()[accelerator.process_index].items()}
        for _ in range(3):
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        plain = []
        for each in (teacher, other):
            try:
                bagua.stats(each)
            except ValueError as error:
                plain.append(str(error))
        stats = bagua.stats(prepared)
        weights = gathered(flat(prepared))
        accelerator.end_training()
        return {"steps": stats.steps, "bytes": stats.total.bytes_sent, "weights": weights, "plain": plain}


def two_models() -> Any:
    """Each model with the optimizer that holds its parameters."""
    with as_launched():
        accelerator = BaguaAccelerator(cpu=True, algorithm="gradient_allreduce")
        models: list[nn.Module] = [tiny_bert(0), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        bert, head, *prepared = accelerator.prepare(*models, *optimizers)
        batch = {name: value[None] for name, value in Sentences()[accelerator.process_index].items()}
        for _ in range(2):
            accelerator.backward(bert(**batch).loss)
            accelerator.backward(head(torch.full((1, 4), accelerator.process_index + 1.0)).sum())
            for optimizer in prepared:
                optimizer.step()
                optimizer.zero_grad()
        steps = [bagua.stats(each).steps for each in (bert, head)]
        ranks = [gathered(flat(each)) for each in (bert, head)]
        accelerator.free_memory()
        return {"steps": steps, "ranks": ranks, "again": [hasattr(each, "no_sync") for each in (bert, head)]}


def evaluate(algorithm: str) -> Any:
    """Evaluate within `evaluation()`; returns the weights at its begin and its end, of all ranks."""
    with as_launched():
        loop = Loop(algorithm)
        loop.run(3)
        before = gathered(flat(loop.model))
        with loop.accelerator.evaluation():
            at_begin = gathered(flat(loop.model))
            with torch.no_grad():
                for batch in loop.loader:
                    loop.model.eval()(**batch)
            at_end = gathered(flat(loop.model))
        loop.model.train()
        loop.run(2)
        loop.accelerator.free_memory()
        return {"before": before, "at_begin": at_begin, "at_end": at_end}


def save_tied(out: str) -> Any:
    """Weights that are views of a bucket, some of them tied, through `save_model` and `save_pretrained`."""
    with as_launched():
        accelerator: Any = BaguaAccelerator(cpu=True, algorithm="local_sgd")
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            tokens = torch.arange(3, 11)[None] + accelerator.process_index
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        with accelerator.evaluation():
            state = accelerator.get_state_dict(model)
            unwrapped = accelerator.unwrap_model(model)
            unwrapped.save_pretrained(out, state_dict=state, is_main_process=accelerator.is_main_process)
            accelerator.wait_for_everyone()
            again = type(unwrapped).from_pretrained(out)
            same = torch.equal(flat(again), flat(unwrapped))
        stored = sum(value.nbytes for value in load_file(f"{out}/model.safetensors").values())
        accelerator.free_memory()
        return {"same": same, "stored": stored, "bytes": 4 * flat(unwrapped).numel()}


def resume_tied(out: str, algorithm: str) -> Any:
    """Train a model with tied weights, save half way and go on; then again from there, in a new model."""
    through = _train_tied(algorithm, 0, lambda accelerator: accelerator.save_state(out))
    again = _train_tied(algorithm, 1, lambda accelerator: accelerator.load_state(out))
    return {"through": through, "again": again}


def _train_tied(algorithm: str, seed: int, between: Callable[[Any], object]) -> Any:
    with as_launched():
        accelerator: Any = BaguaAccelerator(cpu=True, algorithm=algorithm)
        model = tiny_llama(seed)
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))

        def step(first: int) -> None:
            tokens = torch.arange(first, first + 8)[None] + accelerator.process_index
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()

        step(3 + seed)
        between(accelerator)
        step(20)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        accelerator.free_memory()
        return {"tied": tied, "weights": flat(model)}


def fail_on_one_rank(out: str) -> Any:
    """Rank 0 cannot write a file; then a file that only it reads is truncated. Trains on after both errors."""
    with as_launched():
        loop = Loop("local_sgd")
        loop.run(1)
        rank, said = loop.accelerator.process_index, []
        hook = loop.accelerator.register_save_state_pre_hook(_refuse if rank == 0 else _accept)
        said.append(_error_of(loop.accelerator.save_state, f"{out}/first"))
        hook.remove()
        place = f"{out}/{rank}"  # only rank 0's is damaged below
        Path(place).mkdir()
        loop.accelerator.save_state(f"{out}/shared")
        shutil.copytree(f"{out}/shared", place, dirs_exist_ok=True)
        if rank == 0:
            path = Path(place, "model.safetensors")
            path.write_bytes(path.read_bytes()[:-7])
        said.append(_error_of(loop.accelerator.load_state, place))
        loop.run(1)
        steps = bagua.stats(loop.model).steps
        loop.accelerator.free_memory()
        return {"said": said, "steps": steps}


def _refuse(*_: Any) -> None:
    raise OSError("no space left")


def _accept(*_: Any) -> None:
    pass


def _error_of(call: Callable[[str], object], where: str) -> str:
    try:
        call(where)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
