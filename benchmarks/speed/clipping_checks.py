"""Are the steps that clipping.py measures the right ones, and where does their time go?"""

import time

import torch
from clipping_steps import METHODS
from networks import NETWORKS

import lipdp.clipping


def self_check(device: torch.device) -> None:
    """Replayed sums are those of an eager call, for fresh inputs and another C, and of the naive loop."""
    for network in ("cnn-small", "rnn", "paper-transformer"):
        make, inputs, classes = NETWORKS[network]
        torch.manual_seed(1)
        model = make().to(device)
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        captured = lipdp.clipping.Clipper(model, loss)
        for call in range(5):
            x, y = inputs(8, device), torch.randint(0, classes, (8,), device=device)
            mask = torch.arange(8, device=device) < 8 - call
            found = captured(x, y, 0.1 * (call + 1), mask=mask)
            for other in ("bookkeeping", "naive"):
                expected = lipdp.clipping.clip_batch(model, loss, x, y, 0.1 * (call + 1), other, mask=mask)
                error = max(float((found.sums[k] - v).norm() / (v.norm() + 1e-3)) for k, v in expected.sums.items())
                assert error < 5e-3, f"{network}: call {call} is off by {error:.2g} from {other}"
        mode = "replayed" if device.type == "cuda" else "not on CUDA"
        print(f"self-check {network}: 5 calls equal eager and naive; {captured.refused or mode}", flush=True)


def dropout_check(device: torch.device) -> None:
    """From the same seed, a replay draws the same masks as an eager call; from another, others."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 3)).to(device)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(16, 20, device=device), torch.randint(0, 3, (16,), device=device)
    captured, results = lipdp.clipping.Clipper(model, loss), []
    for call in range(6):
        torch.manual_seed(call // 2)
        found = captured(x, y, 1.0).sums["0.weight"]
        torch.manual_seed(call // 2)
        expected = lipdp.clipping.clip_batch(model, loss, x, y, 1.0).sums["0.weight"]
        assert float((found - expected).norm()) < 1e-3 * float(expected.norm()), f"dropout: call {call} drew other masks"
        results.append(found)
    assert torch.allclose(results[4], results[5])
    assert not torch.allclose(results[3], results[4])
    mode = "replayed" if device.type == "cuda" else "not on CUDA"
    print(f"self-check dropout: masks follow the seed; {captured.refused or mode}", flush=True)


def profile(network: str, batch: int, method: str, device: torch.device) -> None:
    """Where the time of a step goes: kernels by total time, and the device's and the host's time per step."""
    make, inputs, classes = NETWORKS[network]
    torch.manual_seed(0)
    model = make().to(device)
    x, y = inputs(batch, device), torch.randint(0, classes, (batch,), device=device)
    step = METHODS[method](model, x, y)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        started = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - started) * 200
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    totals: dict[str, list[float]] = {}
    for event in kernels:
        entry = totals.setdefault(event.name, [0.0, 0.0])
        entry[0] += event.device_time_total / 5e3
        entry[1] += 1 / 5
    whole, launches = (sum(entry[k] for entry in totals.values()) for k in (0, 1))
    print(f"\n{network} batch {batch} {method}: {wall:.2f} ms a step (profiled), {whole:.2f} ms of kernels, {launches:.0f} kernels")
    for name, (ms, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:14]:
        print(f"  {ms:7.3f} ms  {count:5.0f} ×  {name[:110]}", flush=True)
