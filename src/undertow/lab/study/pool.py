"""The runs of a study, several at a time, in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from undertow.errors import CheckpointError, ConfigError, DivergedError, Interrupted
from undertow.lab.evaluation.run import evaluate_run
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Run
from undertow.lab.signals import hearing, stop
from undertow.lab.study.settings import Study
from undertow.lab.training.run import train
from undertow.plugins import load_plugins

GOES_ON = (
    "finished runs are kept, and the same command goes on with the others from their last "
    "checkpoints"
)


def make(settings: Study, recipes: Collection[Recipe]) -> None:
    """Train and evaluate what is not yet. SIGINT and SIGTERM are passed on to the runs, which save
    a checkpoint each."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            for process in active_children():
                process.kill()
            raise Interrupted(number, GOES_ON)

    jobs = [(each, seed) for seed in settings.seeds for each in recipes if not finished(each, seed)]
    context, free = get_context("spawn"), places(settings.workers)
    workers = max(1, min(len(free), len(jobs)))
    queue = context.SimpleQueue()
    for place in free:
        queue.put(place)
    begun, ended = 0, 0
    running: set[Future[Path]] = set()
    with hearing(hear), ProcessPoolExecutor(workers, context, begin_worker, (queue,)) as pool:
        while True:
            # Only as many as go on at a time are handed over: a pool runs what it holds even after
            # a failure or a signal.
            while begun < len(jobs) and len(running) < workers and not heard:
                running.add(pool.submit(train_and_evaluate, *jobs[begun]))
                begun += 1
            if not running:
                break
            done, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            for job in done:
                try:
                    folder = job.result()
                except Interrupted as error:
                    heard.append(error.number)
                except BrokenProcessPool as error:
                    if not heard:
                        raise ConfigError(
                            "the process of a run was killed, as it is when memory runs out; "
                            f"workers is {settings.workers}: use fewer, and the same command goes "
                            "on"
                        ) from error
                else:
                    ended += 1
                    print(f"{ended}/{len(jobs)} {folder}", file=sys.stderr, flush=True)
            for process in active_children() if heard else ():
                process.terminate()  # again and again, as one may have been between two runs
    if heard:
        raise Interrupted(heard[0], GOES_ON)


def finished(recipe: Recipe, seed: int) -> bool:
    """Whether a run is trained, and evaluated as the recipe says.

    Raises:
        CheckpointError: its folder was made by another recipe.
    """
    run = Run.of(recipe, seed)
    mended = run.check(recipe)
    for file in run.results:
        if file.is_dir():
            raise CheckpointError(f"{file} is a folder, where a run's results belong; move it away")
    if run.diverged():
        return not mended
    if not run.finished or not any(file.is_file() for file in run.results):
        return False
    return run.recipe().evaluation == recipe.evaluation


def train_and_evaluate(recipe: Recipe, seed: int) -> Path:
    """Train and evaluate one recipe with one seed; what it prints goes to a file beside its
    folder."""
    load_plugins(recipe.plugins)
    run = Run.of(recipe, seed)
    quiet_libraries()
    torch.set_num_threads(recipe.training.threads or 1)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    for file in run.results:  # they are not what the recipe that is saved next says
        file.unlink(missing_ok=True)
    with (
        run.folder.with_name(f"{run.name}.output").open("w") as output,
        redirect_stdout(output),
        redirect_stderr(output),
        hearing(stop, [signal.SIGTERM]),
    ):
        try:
            train(recipe, seed)
            evaluate_run(run, recipe)
        except DivergedError as error:  # a finding like others
            print(error)
    return run.folder


def places(workers: int) -> list[str]:
    """Where runs go on at a time: one on each GPU, by what CUDA_VISIBLE_DEVICES shall be there, or
    as many `workers` on a CPU."""
    count = torch.cuda.device_count()
    if count == 0:
        return [""] * workers
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[:count] if seen else [str(number) for number in range(count)]


def begin_worker(places: Any) -> None:
    """Take a place, and leave signals to the process that started this one, which passes them on,
    and end with it."""
    if place := places.get():  # PyTorch looks at this when CUDA is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # between two runs
    end_with_parent()


def end_with_parent() -> None:
    """End this process when the one that started it ends, however it ends.

    A pool's process would finish its run first, beside whatever is started next. Nothing on disk is
    lost by that: the same command goes on from the last checkpoint.
    """
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
