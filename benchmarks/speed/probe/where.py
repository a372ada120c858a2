"""Where the time of binding, of rounds and of fair goes. python profile.py PART"""

import cProfile, io, json, os, pstats, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np, torch
import scaffpd as sp

OUT = os.environ.get("OUT", "/tmp")
DEV = "cuda" if torch.cuda.is_available() else "cpu"
sync = torch.cuda.synchronize if DEV == "cuda" else (lambda: None)


def data(N, m, d, classes=0, labels="squared"):
    def one(i):
        r = np.random.default_rng(i)
        X = r.random((m, d), dtype=np.float32)
        X -= 0.5
        X *= np.float32(12**0.5 / d**0.5)
        y = r.integers(0, classes, m) if classes else (X[:, :50].sum(1) * 3 + r.standard_normal(m))
        if labels == "logistic":
            y = (y > 0).astype(int)
        if labels == "poisson":
            y = r.poisson(np.exp(X[:, :50].sum(1)))
        return X, y

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, range(N)))


def top(p, n=25, by="cumulative"):
    s = io.StringIO()
    pstats.Stats(p, stream=s).sort_stats(by).print_stats(n)
    return "\n".join(line for line in s.getvalue().splitlines()[4:] if line.strip())


def rounds(name, N, m, d, loss, classes=0, profile=True, dtype=torch.float32):
    t = time.perf_counter()
    pairs = data(N, m, d, classes, loss)
    print(f"== {name}: data {time.perf_counter() - t:.1f} s", flush=True)
    model = sp.Linear(loss, l2=1e-3, classes=classes or None)
    if DEV == "cuda":
        torch.zeros(1, device=DEV)
        torch.linalg.eigvalsh(torch.eye(4, device=DEV).double())
    p = cProfile.Profile()
    t = time.perf_counter()
    p.enable()
    cohort = sp.Cohort(pairs, model, device=DEV, dtype=dtype)
    sync()
    p.disable()
    print(f"bind {time.perf_counter() - t:.2f} s", flush=True)
    print(top(p, 18, "tottime"), flush=True)
    del pairs
    p = cProfile.Profile()
    t = time.perf_counter()
    p.enable()
    method = sp.ScaffPD(sp.ChiSquare(0.1), local_steps=100)
    cohort.constants()
    sync()
    print(f"constants {time.perf_counter() - t:.2f} s", flush=True)
    state = method.init(cohort)
    sync()
    print(f"init {time.perf_counter() - t:.2f} s", flush=True)
    state = method.round(cohort, state)
    sync()
    p.disable()
    print(f"first round {time.perf_counter() - t:.2f} s", flush=True)
    print(top(p, 22, "tottime"), flush=True)
    for _ in range(2):
        state = method.round(cohort, state)
    sync()
    each = []
    for _ in range(7):
        sync()
        t = time.perf_counter()
        state = method.round(cohort, state)
        sync()
        each.append(1e3 * (time.perf_counter() - t))
    gb = N * m * d * torch.finfo(dtype).bits / 8e9
    print(
        f"ROUND {name}: {' '.join(f'{e:.2f}' for e in each)} ms; 4 passes of {gb:.1f} GB at 4.24 TB/s {4 * gb / 4.24:.2f} ms; gap {state.certificate}",
        flush=True,
    )
    if not profile:
        return
    p = cProfile.Profile()
    p.enable()
    for _ in range(3):
        state = method.round(cohort, state)
    sync()
    p.disable()
    print(top(p, 30, "tottime"), flush=True)
    if DEV == "cuda":
        from torch.profiler import profile as prof, ProfilerActivity as PA

        with prof(activities=[PA.CUDA, PA.CPU]) as q:
            for _ in range(3):
                state = method.round(cohort, state)
            sync()
        print(
            q.key_averages().table(
                sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=60
            )[:9000],
            flush=True,
        )


def fair():
    for N, m, d, loss, dt in (
        ((3, 30, 5, "logistic", torch.float64),)
        if "tiny" in sys.argv
        else (
            (30, 300, 50, "squared", torch.float64),
            (100, 1000, 100, "logistic", torch.float64),
            (20, 5000, 500, "logistic", torch.float64),
            (20, 20000, 1000, "logistic", torch.float64),
        )
    ):
        pairs = data(N, m, d, 0, loss)
        for device in ("cuda", "cpu"):
            for turn in range(2 if device == "cuda" or N * m * d < 1e8 else 1):
                t = time.perf_counter()
                cohort = sp.Cohort(
                    pairs,
                    sp.Linear(loss, l2=1e-3),
                    device=device if DEV == "cuda" else "cpu",
                    dtype=dt,
                )
                sync()
                tb = time.perf_counter() - t
                p = cProfile.Profile()
                if turn:
                    p.enable()
                r = sp.train(
                    sp.fair(sp.ChiSquare(0.1)),
                    cohort,
                    tol=1e-8 if dt == torch.float64 else 1e-5,
                    progress=False,
                )
                sync()
                p.disable()
                print(
                    f"FAIR {N}x{m}x{d} {loss} {str(dt)[6:]} {device}: bind {tb:.2f}, all {time.perf_counter() - t:.2f} s, {type(sp.fair(sp.ChiSquare(0.1))).__name__} {r.status}",
                    flush=True,
                )
            if device == "cuda":
                print(top(p, 14, "tottime"), flush=True)


part = sys.argv[1]
if part == "big":
    rounds("100x500x50000", 100, 500, 50_000, "squared")
elif part == "bigbf16":
    rounds("100x500x50000 bf16", 100, 500, 50_000, "squared", dtype=torch.bfloat16)
elif part == "smallbf16":
    rounds("10x500x20000 bf16", 10, 500, 20_000, "squared", dtype=torch.bfloat16, profile=False)
elif part == "small":
    rounds("10x500x20000", 10, 500, 20_000, "squared")
elif part == "softmax":
    rounds("10x500x20000 softmax", 10, 500, 20_000, "softmax", 10)
elif part == "logistic":
    rounds("10x500x20000 logistic", 10, 500, 20_000, "logistic", 0)
elif part == "tiny":
    rounds("tiny", 3, 20, 30, "squared")
    rounds("tiny softmax", 3, 20, 30, "softmax", 3)
elif part == "fair":
    fair()
