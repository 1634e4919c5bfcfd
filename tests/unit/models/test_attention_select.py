import jax
import jax.numpy as jnp
import pytest

from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.models.attention import attention, chosen_implementation
from geojax.models.attention.cudnn import support as cudnn
from geojax.runtime.platform import CPU, target_platform


@pytest.fixture
def with_libraries(monkeypatch):
    """As if cuDNN 9.10 were installed."""
    monkeypatch.setattr(cudnn, "libraries_version", lambda: 91000)


@pytest.fixture
def without_libraries(monkeypatch):
    monkeypatch.setattr(cudnn, "libraries_version", lambda: None)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(UserError, match="'flash'; there are: auto, blocked, cudnn, reference"):
        chosen_implementation(jnp.float32, 64, packed=False, implementation="flash")


def test_a_cpu_gets_blocked():
    choice = chosen_implementation(jnp.bfloat16, 64, packed=True, platform="cpu")
    assert choice == ("blocked", "attention: blocked, for platform cpu")


@pytest.mark.usefixtures("with_libraries")
@pytest.mark.parametrize("packed", [False, True])
def test_a_gpu_gets_cudnn(packed):
    assert chosen_implementation(jnp.bfloat16, 128, packed=packed, platform="cuda").name == "cudnn"


@pytest.mark.usefixtures("with_libraries")
@pytest.mark.parametrize(
    ("dtype", "head_size", "reason"),
    [(jnp.float32, 64, "inputs are float32"), (jnp.bfloat16, 60, "multiple of 8")],
)
def test_what_cudnn_cannot_compute_is_blocked_on_a_gpu(dtype, head_size, reason):
    choice = chosen_implementation(dtype, head_size, packed=False, platform="gpu")
    assert choice.name == "blocked"
    assert reason in choice.reason


@pytest.mark.usefixtures("with_libraries")
def test_packing_needs_a_recent_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "libraries_version", lambda: 90500)
    choice = chosen_implementation(jnp.bfloat16, 64, packed=True, platform="gpu")
    assert choice.name == "blocked"
    assert "90500" in choice.reason


@pytest.mark.usefixtures("without_libraries")
def test_cudnn_by_name_without_its_libraries_is_one_line():
    x = jnp.zeros((1, 8, 2, 8), jnp.bfloat16)
    with pytest.raises(UserError, match="not installed") as error:
        attention(x, x, x, implementation="cudnn")
    assert "\n" not in str(error.value)


def test_inside_a_shard_map_the_mesh_says_the_platform():
    seen = []

    def local(x):
        seen.append(target_platform())
        return x

    spec = jax.sharding.PartitionSpec("dc")
    mapped = jax.shard_map(local, mesh=make_mesh(dc=2, data=4), in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, jnp.zeros(2))
    assert seen == [CPU]
