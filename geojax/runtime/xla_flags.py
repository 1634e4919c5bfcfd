"""All XLA flags that geojax sets, each with its reason, and the line for the log about them.

Flags go into the environment variable XLA_FLAGS, which XLA reads once, when its first backend
starts. What the user put there stays as it is. Every flag here is known to the XLA of JAX 0.10,
0.11 and 0.12: an unknown one ends the process.
"""

import importlib.util
import os

import jax

from geojax.errors import UserError
from geojax.runtime.jax_private import backend_runs
from geojax.runtime.platform import PlatformName

_CPU_FLAGS = {
    # Simulated devices share a few cores, so that one may reach a collective minutes after another
    # in a large model. XLA aborts after 40 s by default; geojax's watchdog judges slowness better.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "1200",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "60",
}

_GPU_FLAGS = {
    # Start collectives as early and await them as late as their operands allow.
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
    # XLA otherwise merges the buckets of a gradient into one collective, and the cross-site phase
    # of one bucket could no longer overlap the in-site phase of the next.
    "--xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes": "0",
    # Several collectives in flight at once: buckets on the long link, and hops beside them. Those
    # in a loop or a branch count too, so that with 4 the hops of a pipeline waited for its ticks.
    "--xla_gpu_experimental_parallel_collective_overlap_limit": "16",
    # Make a clique for each chain of stages that send to each other. Otherwise a permute makes one
    # of all devices of the job, in which NCCL sends much more slowly (openxla/xla#40505). HLO and
    # thunk dump are the same with it and without; the groups of the permute in the serialized
    # executable are not: compiled for 16 H100s in four chains, four of 4 devices and one of 16.
    "--xla_gpu_collective_permute_connected_components": "true",
    # See that what a branch in a loop writes can be written in place. Otherwise every tick of a
    # pipeline with branches copies its rings and gradients (34.7 instead of 18.8 GB in one case).
    "--xla_gpu_copy_insertion_use_region_analysis": "true",
    # Percent of 80% of a GPU's memory that a program may take before XLA orders it for memory and
    # no longer for overlap: 72.2 GB of an H100's 85.2 GB, of which a run may fill 72 GB (see
    # `geojax.runtime.device_memory`). XLA's own 95 are 64.7 GB. A step of a 340B that takes 67 GB
    # then has 37% of its gradients over `data` beside ticks instead of 78%.
    "--xla_gpu_memory_limit_slop_factor": "106",
}


ONE_CLIQUE_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_collective_permute_connected_components": False,
}
"""Compiler options of one program for GPUs whose permutes' chains of stages exclude each other (see
`geojax.pipeline.execution.cliques`)."""

FP8_OPTIONS: dict[str, str | bool] = {
    # XLA otherwise hands matrix products to Triton, in whose kernels nothing is FP8.
    "xla_gpu_enable_triton_gemm": False,
    # It otherwise makes one product of small ones that read the same matrix (query, key and value),
    # puts their scaled FP8 matrices together in bf16, and no longer sees what they were.
    "xla_gpu_dot_merger_threshold_mb": "0",
}
"""Compiler options of one program for GPUs, of which cuBLASLt is to make the FP8 products."""

MULTI_STREAM_OPTIONS: dict[str, str | bool] = {
    # All collectives of a program otherwise share one stream, on which the in-site phase of a
    # bucket waits for the cross-site phase of another. XLA gives them two, and schedules together
    # only groups that share at most one device, which cannot wait for each other in NCCL.
    #
    # Nothing else that was tried on a Llama 3 8B of 4 layers (JAX 0.10.2) helps. The sum over sites
    # is beside 14 of the 14 products of a backward iteration, and at 2 x 128 H100s in flight with
    # the reduce-scatter. `jax.experimental.scheduling_groups` changes nothing, since XLA for GPUs
    # does not read its attribute. With the one that it reads (`_scheduling_group_id`, the same for
    # both phases) no product is beside either of them at 2 x 8, and at 2 x 128 the scheduler fails.
    # With `control_dep` (`jax.experimental.overlap`) no program compiles, on JAX 0.11.2 neither:
    # XLA for GPUs does not rewrite that call. It could but make one phase wait for another's end.
    #
    # `xla_gpu_collective_domain_assignment` (jaxlib 0.11.2) parts the two phases only where NVLink
    # joins all GPUs of a site. On H100 hosts it parts `tensor` from the rest, and no bucket or
    # hop gains a product beside it. In the 70B steps 1% of the reduce-scatter over `tensor` travels
    # beside products, instead of a quarter. In the 340B step no share rises, and the compute waits
    # for half of the hops (JAX 0.12, docs/records/xla-collective-options.md).
    "xla_gpu_experimental_enable_collective_multi_streaming": True,
}
"""Compiler options of one program for GPUs without a pipeline that reduces gradients inside and
between sites while its backward pass runs."""

JOINT_TICKS_OPTIONS: dict[str, str | bool] = {
    # XLA otherwise times each message by its bytes, as if none waited for another on their stream,
    # and awaits one that it starts behind two others. Nine of the ten messages over `tensor` of a
    # tick are beside products without; with it six are (340B on 2 x 1,536 H100s, JAX 0.12.0.1).
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
}
"""Compiler options of one program for GPUs whose ticks have a forward and a backward in one branch
(`geojax.pipeline.execution.tick_program`)."""

UNROLLED_OPTIONS: dict[str, str | bool] = {
    # XLA's own choice, and branches and loops. A branch is then chosen on the GPU: otherwise the
    # host waits for attention's choice of a kernel in each layer, which took 5 ms of a step of
    # 275 ms. What has a collective in it stays as it is.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
}
"""Compiler options of one program for GPUs that holds each layer by itself: nearly all of it are
CUDA graphs."""

CUSTOM_PRODUCTS_OPTIONS: dict[str, str | bool] = {
    # XLA otherwise lets a custom call write into the stack of what a loop keeps, and makes the call
    # once more for whoever else reads its result.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
"""Compiler options of one program for GPUs whose matrix products are custom calls."""


def recommended_flags(platform: PlatformName) -> dict[str, str]:
    """Return the flags that geojax sets on that platform, by name."""
    flags: dict[PlatformName, dict[str, str]] = {
        "cpu": _CPU_FLAGS,
        "gpu": _GPU_FLAGS,
    }
    return dict(flags[platform])


def gpu_compiler_options() -> dict[str, str | bool | int]:
    """Return the flags for GPUs as options of one program, without those that the user has set.

    They compile a program ahead of time, in a process that runs on CPUs.
    """
    return {
        name.removeprefix("--"): value == "true" if value in ("true", "false") else int(value)
        for name, value in recommended_flags("gpu").items()
        if name not in _given()
    }


def apply_xla_flags(platform: PlatformName) -> None:
    """Add the recommended flags to XLA_FLAGS, except those that the user has set.

    Raises:
        UserError: a backend already runs, so that flags would be ignored.
    """
    added = [
        f"{name}={value}"
        for name, value in recommended_flags(platform).items()
        if name not in _given()
    ]
    if not added:
        return
    if backend_runs():
        raise UserError(
            "JAX already runs a backend, so XLA flags would be ignored: call geojax.runtime.start "
            "before the first JAX operation"
        )
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *added])


def _given() -> set[str]:
    """Return the names of the flags in XLA_FLAGS."""
    return {flag.split("=", 1)[0] for flag in os.environ.get("XLA_FLAGS", "").split()}


def expected_platform() -> PlatformName:
    """Find out on which platform JAX will run, without starting it."""
    requested = (getattr(jax.config, "jax_platforms", None) or "").split(",")[0]
    if requested == "cpu":
        return "cpu"
    if requested in ("cuda", "gpu", "rocm"):
        return "gpu"
    plugins = (importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))
    return "gpu" if any(plugins) else "cpu"


def flags_in_force() -> str:
    """Return one line for the log: XLA_FLAGS, and NPROC where it is set."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    threads = os.environ.get("NPROC")
    line = "XLA flags: " + (" ".join(flag.removeprefix("--xla_") for flag in flags) or "none")
    return line + (f"; NPROC={threads}" if threads else "")
