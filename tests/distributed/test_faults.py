"""A job that dies ends in bounded time with a clear last line, and started again trains to the same bits."""

import time

import mindspore as ms
import numpy as np
import pytest

from tests.distributed import launch, steps, training

pytestmark = pytest.mark.processes
WORKER = "tests.distributed.training"
RANKS = 2
TIMEOUT = 10  # MS_NODE_TIMEOUT, seconds


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    launch.run(WORKER, RANKS, folder / "logs", folder)
    return folder


def assert_resumes(folder, unbroken, step):
    """The job, started again in `folder`, goes on after `step` steps and ends as the unbroken one did."""
    job = launch.run(WORKER, RANKS, folder / "again", folder)
    assert all(f"rank {rank} starts at step {step}" in job.text for rank in range(RANKS))
    for rank in range(RANKS):
        found, expected = (dict(np.load(path / f"end_{rank}.npz")) for path in (folder, unbroken))
        assert set(found) == set(expected)
        assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    assert not list(folder.rglob("*partial*"))


def fails(folder, fault, ranks=RANKS):
    """Run the job with a fault; it must end by itself, not well, and say so in msrun's last line."""
    process = launch.start(WORKER, ranks, folder / "logs", folder, fault, MS_NODE_TIMEOUT=str(TIMEOUT))
    job = launch.end(process, folder / "logs", timeout=120)
    assert job.code not in (0, None), job.text[-3000:]
    last = (folder / "logs" / "msrun.log").read_text().strip().splitlines()[-1]
    assert last.startswith("RuntimeError: Distributed job exited with exception.")
    return job


@pytest.mark.slow
def test_kill_of_one_rank_in_mid_step(tmp_path, unbroken):
    job = fails(tmp_path, "kill")
    assert "exit with exception. Error code: -9" in job.text
    assert_resumes(tmp_path, unbroken, training.FAULT - 1)


@pytest.mark.slow
def test_full_disk_on_one_rank(tmp_path, unbroken):
    job = fails(tmp_path, "full")
    assert f"step_{training.FAULT + 1:010d}.ckpt could not be written" in job.text
    assert_resumes(tmp_path, unbroken, training.FAULT - 1)


@pytest.mark.slow
def test_kill_of_the_whole_job_while_one_rank_writes(tmp_path, unbroken):
    process = launch.start(WORKER, RANKS, tmp_path / "logs", tmp_path, "write")
    saved = tmp_path / "checkpoints" / "rank_0" / f"step_{training.FAULT + 1:010d}.ckpt"
    deadline = time.monotonic() + 120
    while not (saved.exists() and (tmp_path / "writing").exists()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    launch.kill_group(process)
    assert list(tmp_path.rglob("*partial*"))  # rank 1 had begun to write, rank 0 is one checkpoint ahead
    assert_resumes(tmp_path, unbroken, training.FAULT - 1)


@pytest.mark.slow
def test_kill_of_the_whole_job_between_writes(tmp_path, unbroken):
    process = launch.start(WORKER, RANKS, tmp_path / "logs", tmp_path, "write")
    saved = tmp_path / "checkpoints" / "rank_1" / f"step_{training.FAULT - 1:010d}.ckpt"
    deadline = time.monotonic() + 120
    while not saved.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    launch.kill_group(process)
    assert_resumes(tmp_path, unbroken, training.FAULT - 1)


@pytest.mark.slow
def test_different_scales_end_the_job(tmp_path):
    job = fails(tmp_path, "scales")
    assert "The ranks start with different values of 'scale_sense': [1024.0, 2048.0]" in job.text


@pytest.mark.slow
def test_a_world_of_one_is_refused(tmp_path):
    job = fails(tmp_path, "", ranks=1)
    assert "the parallel mode is data_parallel, but there is only one rank" in job.text


def test_data_parallel_without_init_is_refused():
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL)
    try:
        with pytest.raises(RuntimeError, match=r"init\(\) was not called"):
            steps.train_cell()
    finally:
        ms.reset_auto_parallel_context()
