"""One program that runs a table of ticks on all stages, with a model's own functions."""

from geojax.pipeline.execution.executor import Executor as Executor
from geojax.pipeline.execution.stage_functions import Microbatch as Microbatch
from geojax.pipeline.execution.stage_functions import PipelineGradients as PipelineGradients
from geojax.pipeline.execution.stage_functions import StageFunctions as StageFunctions
from geojax.pipeline.execution.stage_functions import StageWeights as StageWeights
from geojax.pipeline.execution.tick_program import TickProgram as TickProgram
