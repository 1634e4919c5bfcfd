"""What a program is compiled for."""

import jax


def target_platform() -> str:
    """The platform of the program that is being traced: "cpu", "gpu", "tpu" ...

    Inside a `shard_map` it is that of the mesh's devices, which may be a topology that this machine
    does not have (an ahead-of-time compile); elsewhere it is JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = getattr(device, "platform", None)
    return platform or jax.default_backend()
