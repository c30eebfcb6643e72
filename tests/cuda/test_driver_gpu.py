"""gnnaccel.cuda.runtime.cupy_driver on a GPU: what a kernel receives, from several threads, streams and
devices."""
from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from gnnaccel.cuda.runtime import cupy_driver, driver

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not driver.available()[0], reason=driver.available()[1])]

# One parameter of each kind, with gaps for alignment between them; large dynamic shared memory.
ECHO = r"""
extern "C" __global__ void echo(const double* x, int a, double* y, float b, unsigned long long c, int d, long long e, int n) {
    extern __shared__ double memory[];
    double* last = memory + (n - 1);
    if (threadIdx.x == 0) {
        *last = x ? *x : -1.0;
        double values[] = {*last, (double)a, (double)b, (double)c, (double)d, (double)e, (double)gridDim.x, (double)blockDim.x};
        for (int i = 0; i < 8; ++i) y[i] = values[i];
    }
}
extern "C" __global__ void put(double* y, int slot, int number, float factor) { y[slot] = number * factor; }
"""


@pytest.fixture(params=[cupy_driver.DirectKernel, cupy_driver.PlainKernel], ids=["direct", "plain"])
def cupy(request, monkeypatch):
    monkeypatch.setattr(cupy_driver.sources, "source", lambda family: ECHO)
    made = cupy_driver.CupyDriver()
    # every CuPy that we support has what it needs
    assert made._kernel_type is cupy_driver.DirectKernel
    made._kernel_type = request.param
    return made


SCALARS = np.int32(-7), np.float32(0.5), np.uint64(2**53), np.int32(9), np.int64(-2**40)


def echo(kernel, device="cuda", shared=64, scalars=SCALARS):
    """What the kernel read. Its last parameter, made here, is a plain int whenever the other
    scalars are."""
    x, y = torch.full((1,), 3.25, dtype=torch.float64,
                      device=device), torch.zeros(8, dtype=torch.float64, device=device)
    a, b, c, d, e = scalars
    n = np.int32(shared // 8) if scalars is SCALARS else shared // 8
    kernel((5, 1), 64, shared, (x.data_ptr(), a, y.data_ptr(), b, c, d, e, n))
    return y.tolist()


EXPECTED = [3.25, -7, 0.5, 2**53, 9, -2**40, 5, 64]


def test_every_kind_of_argument_arrives(cupy):
    kernel = cupy.kernel("some", "echo", ())
    assert echo(kernel) == EXPECTED
    assert echo(kernel, scalars=(-7, 0.5, 2**53, 9, -2**40)) == EXPECTED


def test_large_shared_memory(cupy):
    kernel = cupy.kernel("some", "echo", ())
    assert [echo(kernel, shared=shared) for shared in (49152, 65536, 57344, 64)] == [EXPECTED] * 4


def run_threads(work, count):
    failures = []

    def guarded(number):
        try:
            work(number)
        except BaseException as problem:  # shown by the assertion below
            failures.append(problem)
    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_threads_do_not_mix_their_arguments(cupy):
    kernel, launches, count = cupy.kernel("some", "put", ()), 3000, 4
    results = torch.zeros(count, launches, dtype=torch.float64, device="cuda")
    kernel((1, 1), 1, 0, (results.data_ptr(), np.int32(0), np.int32(0), np.float32(0)))
    torch.cuda.synchronize()

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            base = results[number].data_ptr()
            for i in range(launches):
                kernel((1, 1), 1, 0, (base, i, number * launches + i, 2.0))
            torch.cuda.current_stream().synchronize()
    run_threads(work, count)
    assert torch.equal(results.cpu().flatten(),
                       2.0 * torch.arange(count * launches, dtype=torch.float64))


def test_first_use_of_the_gpu_on_a_thread(cupy):
    """Nothing has made a context current there."""
    kernel = cupy.kernel("some", "put", ())
    y = torch.zeros(2, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    run_threads(lambda number: kernel((1, 1), 1, 0,
                                      (y.data_ptr(), np.int32(number), np.int32(3), np.float32(2))),
                2)
    torch.cuda.synchronize()
    assert y.tolist() == [6.0, 6.0]


def test_launches_go_to_the_current_stream_and_into_graphs(cupy):
    kernel = cupy.kernel("some", "put", ())
    y = torch.zeros(2, dtype=torch.float64, device="cuda")
    kernel((1, 1), 1, 0, (y.data_ptr(), np.int32(0), np.int32(1), np.float32(1)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel((1, 1), 1, 0, (y.data_ptr(), np.int32(1), np.int32(5), np.float32(1)))
    assert y.tolist() == [1.0, 0.0]
    graph.replay()
    assert y.tolist() == [1.0, 5.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_in_turn(cupy):
    kernel = cupy.kernel("some", "echo", ())
    for device in (0, 1, 1, 0):
        with torch.cuda.device(device):
            assert echo(kernel, f"cuda:{device}") == EXPECTED
            run_threads(lambda number: torch.cuda.set_device(device)
                        or echo(kernel, f"cuda:{device}"), 1)


COUNTED = """
import sys, torch
from cupy.cuda import compiler
compiled, true = [], compiler._NVRTCProgram.compile
compiler._NVRTCProgram.compile = lambda self, *args, **kwargs: (compiled.append(self.src), true(self, *args, **kwargs))[1]
from gnnaccel.cuda.runtime import driver
from tests.cuda import variants
for defines in variants.sample_defines("column_sum")[:2]:
    driver.current().kernel("column_sum", "column_sum", defines)
print(len(compiled), sum(text == "" for text in compiled), *driver.compile_seconds())
"""


def test_a_second_process_compiles_nothing_but_cupys_empty_text(tmp_path):
    """CuPy compiles an empty text once per set of options, to learn of NVRTC's version; all our
    kernels have the same options."""
    seen = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True,
                              timeout=120,
                              env={**os.environ, "CUPY_CACHE_DIR": str(tmp_path),
                                   "PYTHONPATH": os.getcwd()})
        assert done.returncode == 0, done.stderr
        seen.append([int(number) for number in done.stdout.split()[:2]])
        files = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.glob("*.cubin"))
        assert len(files) == 2 and done.stdout.split()[-1] == "2"
    assert seen == [[3, 1], [1, 1]]
