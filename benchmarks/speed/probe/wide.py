import torch, triton
from scaffpd.models import kernels

n = 2**31
s = torch.empty(n, dtype=torch.uint8, device="cuda").random_(0, 255)
t = torch.empty_like(s)
rate = 2 * n / triton.testing.do_bench(lambda: t.copy_(s), return_mode="median") / 1e6
for m, d, dt, ks in (
    (50_000, 50_000, torch.float32, (1, 10, 30, 100)),
    (50_000, 50_001, torch.float32, (1,)),
    (5_000, 20_000, torch.float32, (1, 10, 100)),
    (5_000, 20_000, torch.bfloat16, (1,)),
):
    A = torch.randn(m, d, device="cuda").to(dt)
    for k in ks:
        for turned in (False, True):
            X = torch.randn(m if turned else d, k, device="cuda")
            X = X.double() if turned else X
            ms = triton.testing.do_bench(
                lambda: kernels.product(A, X, turned), warmup=5, rep=40, return_mode="median"
            )
            print(
                f"WIDE {m}x{d} {dt} k={k} {'AT V' if turned else 'A X'}: {ms:.3f} ms, {A.numel() * A.element_size() / rate / 1e6 / ms:.2f} of copy",
                flush=True,
            )
    del A
