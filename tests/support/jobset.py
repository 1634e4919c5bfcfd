"""What a JobSet of jobset.x-k8s.io/v1alpha2 may hold, as strict as `kubectl apply` is.

Every field of the JobSet itself is here (api/jobset/v1alpha2 of kubernetes-sigs/jobset); of the
Job and the Pod in it (batch/v1 and v1 of Kubernetes) those that a training job has a use for. An
unknown field, a missing one, a number in place of a string is an error.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
RuleName = Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
Count = Annotated[int, Field(ge=0)]
HOST_NAME_LENGTH = 63


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Metadata(Part):
    name: Name | None = None
    namespace: Name | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Variable(Part):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    value_from: dict[str, Any] | None = None


class Resources(Part):
    limits: dict[str, str | int] = {}
    requests: dict[str, str | int] = {}


class Mount(Part):
    name: Name
    mount_path: str
    sub_path: str | None = None
    read_only: bool | None = None


class Container(Part):
    name: Name
    image: str
    command: list[str] | None = None
    args: list[str] | None = None
    working_dir: str | None = None
    env: list[Variable] = []
    ports: list[dict[str, Any]] = []
    resources: Resources | None = None
    volume_mounts: list[Mount] = []
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    security_context: dict[str, Any] | None = None


class Claim(Part):
    claim_name: Name
    read_only: bool | None = None


class EmptyFolder(Part):
    medium: Literal["", "Memory"] | None = None
    size_limit: str | None = None


class Volume(Part):
    name: Name
    persistent_volume_claim: Claim | None = None
    empty_dir: EmptyFolder | None = None
    host_path: dict[str, str] | None = None
    config_map: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Volume":
        assert len(self.model_fields_set) == 2, "a volume has a name and one source"
        return self


class Pod(Part):
    # A Job takes neither Always nor nothing; the default of a Pod is Always.
    restart_policy: Literal["Never", "OnFailure"]
    containers: Annotated[list[Container], Field(min_length=1)]
    init_containers: list[Container] = []
    volumes: list[Volume] = []
    node_selector: dict[str, str] = {}
    affinity: dict[str, Any] | None = None
    tolerations: list[dict[str, Any]] = []
    termination_grace_period_seconds: Count | None = None
    host_network: bool | None = None
    dns_policy: str | None = None
    service_account_name: str | None = None
    scheduler_name: str | None = None
    priority_class_name: str | None = None


class PodTemplate(Part):
    metadata: Metadata | None = None
    spec: Pod


class ExitCodes(Part):
    container_name: Name | None = None
    operator: Literal["In", "NotIn"]
    values: Annotated[list[int], Field(min_length=1, max_length=255)]


class PodFailureRule(Part):
    action: Literal["FailJob", "FailIndex", "Ignore", "Count"]
    on_exit_codes: ExitCodes | None = None
    on_pod_conditions: list[dict[str, str]] | None = None


class PodFailurePolicy(Part):
    rules: Annotated[list[PodFailureRule], Field(max_length=20)]


class Job(Part):
    template: PodTemplate
    parallelism: Count | None = None
    completions: Count | None = None
    completion_mode: Literal["NonIndexed", "Indexed"] | None = None
    backoff_limit: Count | None = None
    active_deadline_seconds: Count | None = None
    ttl_seconds_after_finished: Count | None = None
    pod_failure_policy: PodFailurePolicy | None = None
    suspend: bool | None = None

    @model_validator(mode="after")
    def _policies_fit(self) -> "Job":
        assert self.pod_failure_policy is None or self.template.spec.restart_policy == "Never", (
            "a pod failure policy needs restartPolicy: Never"
        )
        assert self.completion_mode != "Indexed" or self.completions is not None, (
            "an indexed job needs completions"
        )
        return self


class JobTemplate(Part):
    metadata: Metadata | None = None
    spec: Job


class DependsOn(Part):
    name: Name
    status: Literal["Ready", "Complete"]


class ReplicatedJob(Part):
    name: Name
    group_name: str | None = None
    replicas: Count = 1
    template: JobTemplate
    depends_on: list[DependsOn] = []


class Network(Part):
    enable_dns_hostnames: bool | None = Field(default=None, alias="enableDNSHostnames")
    subdomain: Name | None = None
    publish_not_ready_addresses: bool | None = None


class FailureRule(Part):
    name: RuleName
    action: Literal[
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ]
    on_job_failure_reasons: list[
        Literal[
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        ]
    ] = []
    on_job_failure_message_patterns: list[str] = []
    target_replicated_jobs: list[Name] = []


class FailurePolicy(Part):
    max_restarts: Count = 0
    restart_strategy: Literal["Recreate", "BlockingRecreate", "InPlaceRestart"] | None = None
    rules: list[FailureRule] = []


class SuccessPolicy(Part):
    operator: Literal["All", "Any"]
    target_replicated_jobs: list[Name] = []


class Coordinator(Part):
    replicated_job: Name
    job_index: Count = 0
    pod_index: Count = 0


class JobSetSpec(Part):
    replicated_jobs: list[ReplicatedJob]
    network: Network | None = None
    success_policy: SuccessPolicy | None = None
    failure_policy: FailurePolicy | None = None
    startup_policy: dict[str, str] | None = None
    suspend: bool | None = None
    coordinator: Coordinator | None = None
    managed_by: str | None = None
    ttl_seconds_after_finished: Count | None = None
    volume_claim_policies: list[dict[str, Any]] | None = None


class JobSet(Part):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec

    @model_validator(mode="after")
    def _names_fit(self) -> "JobSet":
        names = [job.name for job in self.spec.replicated_jobs]
        assert len(set(names)) == len(names), f"two replicated jobs have one name: {names}"
        for job in self.spec.replicated_jobs:
            last = (job.template.spec.completions or 1) - 1
            host = f"{self.metadata.name}-{job.name}-{job.replicas - 1}-{last}"
            assert len(host) <= HOST_NAME_LENGTH, f"{host} is longer than a host's name may be"
        return self
