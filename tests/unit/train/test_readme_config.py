"""The run that the README shows is one that geojax accepts."""

import re
from pathlib import Path

import yaml

from geojax.config.run_config import RunConfig
from geojax.topology import Topology

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_config_of_the_readme_is_valid(tmp_path):
    whole, of_huggingface = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(whole)
    config = RunConfig.load(path)
    assert set(yaml.safe_load(of_huggingface)) <= set(RunConfig.model_fields)
    assert config.mesh.devices == Topology.load(config.topology).accelerators
    assert config.communication.gradient_compression == "int8"
