"""examples/cluster: its manifests, scripts and workflow agree, and their schemas accept them."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from programs import ROOT, environment

CLUSTER = ROOT / "examples" / "cluster"
TORCHRUN = (CLUSTER / "torchrun.sh").read_text()
TEXTS = {name: (CLUSTER / f"{name}.yaml").read_text() for name in ("pytorchjob", "jobset")}
MANIFESTS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
WORKERS = MANIFESTS["pytorchjob"]["spec"]["pytorchReplicaSpecs"]["Worker"]
JOB = MANIFESTS["jobset"]["spec"]["replicatedJobs"][0]["template"]["spec"]
PODS = dict(pytorchjob=WORKERS["template"], jobset=JOB["template"])
EACH = pytest.mark.parametrize("name", PODS)


def container(name):
    (container,) = PODS[name]["spec"]["containers"]
    return container


def variables_of(name):
    return {variable["name"]: variable["value"] for variable in container(name)["env"]}


@EACH
def test_a_pod_has_time_to_save(name):
    seconds = int(re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", TORCHRUN)[1])
    assert PODS[name]["spec"]["terminationGracePeriodSeconds"] > seconds > 30


@EACH
def test_the_probe_reads_what_the_program_writes(name):
    arguments = dict(argument.removeprefix("--").split("=") for argument in container(name)["args"])
    probe = container(name)["livenessProbe"]
    command = probe["exec"]["command"][-1]
    assert command.count(arguments["heartbeat"]) == 2
    minutes = int(re.search(r"-mmin -(\d+)", command)[1])
    # torchrun starts hung workers again before the probe fails
    assert 60 * minutes > int(arguments["collective-timeout"])
    assert probe["timeoutSeconds"] > 1


def test_pods_meet_before_they_are_ready():
    assert "readinessProbe" not in container("jobset") and "startupProbe" in container("jobset")
    assert MANIFESTS["jobset"]["spec"]["network"] == dict(
        enableDNSHostnames=True, publishNotReadyAddresses=True
    )
    assert not {"readinessProbe", "startupProbe"} & {*container("pytorchjob")}


@pytest.mark.parametrize("age, alive", [(None, True), (0, True), (20, False)])
def test_the_probe_is_a_shell_command(age, alive, tmp_path):
    heartbeat = tmp_path / "heartbeat"
    if age is not None:
        heartbeat.touch()
        os.utime(heartbeat, (heartbeat.stat().st_mtime - 60 * age,) * 2)
    *shell, command = container("jobset")["livenessProbe"]["exec"]["command"]
    process = subprocess.run([*shell, command.replace("/tmp/heartbeat", str(heartbeat))])
    assert (process.returncode == 0) == alive


@EACH
def test_a_pod_has_shared_memory_gpus_and_no_rights(name):
    spec = PODS[name]["spec"]
    main = container(name)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in main["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/out"]
    paths = [argument.split("=/")[1] for argument in main["args"] if "=/" in argument]
    assert set(mounts) >= {"/" + path.split("/")[0] for path in paths} - {"/tmp"}
    no_rights = dict(allowPrivilegeEscalation=False, capabilities=dict(drop=["ALL"]))
    for each in (main, *spec["initContainers"]):
        assert each["securityContext"] == no_rights
        assert each["resources"]["requests"]["memory"] == each["resources"]["limits"]["memory"]
    for amounts in ("requests", "limits"):
        assert main["resources"][amounts]["nvidia.com/gpu"] == "8"
    assert spec["securityContext"]["runAsNonRoot"]


@EACH
def test_nccl_may_take_any_path(name):
    names = {variable for variable in variables_of(name) if variable.startswith(("NCCL", "GLOO"))}
    assert names == {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert (
        variables_of(name)["NCCL_SOCKET_IFNAME"] == "=" + variables_of(name)["GLOO_SOCKET_IFNAME"]
    )


def test_the_image_is_the_dockerfiles():
    text = (CLUSTER / "Dockerfile").read_text()
    (image,) = re.findall(r"docker build .*-t (\S+) ", text)
    for spec in (pod["spec"] for pod in PODS.values()):
        containers = (*spec["containers"], *spec["initContainers"])
        assert {container["image"] for container in containers} == {image}
        user = int(re.search(r"^USER (\d+)$", text, re.M)[1])
        assert spec["securityContext"]["runAsUser"] == user
        assert spec["containers"][0]["command"] == ["./torchrun.sh"]
    assert f'"{image}"' in (CLUSTER / "workflow.py").read_text()
    folder = re.search(r"^WORKDIR (\S+)$", text, re.M)[1]
    assert f"COPY examples/cluster {folder}\n" in text and f'CMD ["{folder}/torchrun.sh"]' in text
    assert os.access(CLUSTER / "torchrun.sh", os.X_OK)


def test_numbers_of_pods_and_processes_agree():
    spec = MANIFESTS["pytorchjob"]["spec"]
    elastic = spec["elasticPolicy"]
    assert WORKERS["replicas"] == elastic["maxReplicas"] == elastic["minReplicas"]
    assert container("pytorchjob")["name"] == "pytorch"
    assert spec["runPolicy"]["backoffLimit"] > 0
    assert WORKERS["restartPolicy"] == "OnFailure"
    assert spec["nprocPerNode"] == container("pytorchjob")["resources"]["limits"]["nvidia.com/gpu"]
    variables = variables_of("jobset")
    assert re.fullmatch(BACKENDS, variables["PET_RDZV_BACKEND"])
    assert str(JOB["parallelism"]) == str(JOB["completions"]) == variables["PET_NNODES"]
    gpus = container("jobset")["resources"]["limits"]["nvidia.com/gpu"]
    assert variables["PET_NPROC_PER_NODE"] == gpus
    name = MANIFESTS["jobset"]["metadata"]["name"]
    job_name = MANIFESTS["jobset"]["spec"]["replicatedJobs"][0]["name"]
    port = container("jobset")["ports"][0]["containerPort"]
    assert variables["PET_RDZV_ENDPOINT"] == f"{name}-{job_name}-0-0.{name}:{port}"
    assert JOB["template"]["spec"]["restartPolicy"] == "Never"
    assert JOB["completionMode"] == "Indexed"


def run_script(tmp_path, script, *arguments, status=0, **variables):
    """Run a script with stand-ins for torchrun and Slurm's commands.

    Returns torchrun's arguments, its environment variables, and the calls of scontrol.
    """
    settings = 'env | grep -E "^(PET|TORCH|NCCL|GLOO)_" > env'
    stand_ins = dict(
        torchrun=f'{settings}; echo "$@" > torchrun; exit {status}',
        srun='shift; exec "$@"',
        scontrol='case $1 in show) echo one; echo two;; *) echo "$@" >> scontrol;; esac',
    )
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in stand_ins.items():
        if name != "srun":
            text = f"cd {tmp_path}\n{text}"
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    prefixes = "PET_", "TORCH_", "SLURM_"
    env = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    process = subprocess.run(
        ["bash", CLUSTER / script, *arguments], env=env, capture_output=True, text=True
    )
    assert process.returncode == status, process.stderr
    scontrol = tmp_path / "scontrol"
    scontrol_calls = scontrol.read_text() if scontrol.exists() else ""
    settings = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    return (tmp_path / "torchrun").read_text().split(), settings, scontrol_calls


def test_torchrun_on_one_machine(tmp_path):
    arguments, settings, _ = run_script(tmp_path, "torchrun.sh", "--steps", "3")
    assert arguments == ["--standalone", str(CLUSTER / "train.py"), "--steps", "3"]
    assert settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and settings[
        "PET_NPROC_PER_NODE"
    ] in (
        "2",
        "gpu",
    )
    arguments, settings, _ = run_script(
        tmp_path, "torchrun.sh", PET_RDZV_ENDPOINT="one:1", PET_NPROC_PER_NODE="8"
    )
    assert arguments == [str(CLUSTER / "train.py")] and settings["PET_NPROC_PER_NODE"] == "8"


@pytest.mark.parametrize(
    "finished, restarts, requeued", [(False, "1", True), (True, "1", False), (False, "20", False)]
)
def test_slurm(finished, restarts, requeued, tmp_path):
    job = dict(
        SLURM_SUBMIT_DIR=str(CLUSTER),
        SLURM_JOB_NODELIST="x",
        SLURM_JOB_NUM_NODES="2",
        SLURM_GPUS_ON_NODE="4",
        SLURM_JOB_ID="777",
        SLURM_RESTART_COUNT=restarts,
        INTERFACE="ib0",
    )
    out = tmp_path / "out"
    out.mkdir()
    if finished:
        (out / "result.json").touch()
    arguments, settings, scontrol_calls = run_script(
        tmp_path, "slurm.sbatch", "--steps=3", "--out", str(out), status=1, **job
    )
    assert arguments == [str(CLUSTER / "train.py"), "--steps=3", "--out", str(out)]
    assert (
        settings["PET_NNODES"],
        settings["PET_NPROC_PER_NODE"],
        settings["PET_RDZV_ENDPOINT"],
    ) == (
        "2",
        "4",
        "one:20777",
    )
    assert settings["NCCL_SOCKET_IFNAME"] == "=ib0" and settings["GLOO_SOCKET_IFNAME"] == "ib0"
    seconds = int(
        re.search(r"^#SBATCH --signal=TERM@(\d+)$", (CLUSTER / "slurm.sbatch").read_text(), re.M)[1]
    )
    assert int(settings["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < seconds
    assert scontrol_calls == ("requeue 777\n" if requeued else "")


def test_the_data_have_alpacas_shape(tmp_path):
    for path in ("a.jsonl", "b.jsonl"):
        subprocess.run(
            [sys.executable, CLUSTER / "data.py", "--out", tmp_path / path, "--rows=400"],
            check=True,
        )
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 400 and all([*row] == ["instruction", "input", "output"] for row in rows)
    lengths = sorted(len(row["output"]) for row in rows)
    assert lengths[0] > 0 and lengths[-4] > 6 * lengths[200]  # a long tail
    assert 200 < sum(not row["input"] for row in rows) < 300


QUANTITY = r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE]|[eE]\d+)?"
BACKENDS = r"c10d|etcd|etcd-v2|static"  # torchrun's
RESTART_POLICIES = r"Always|OnFailure|Never|ExitCode"
PODS_RULES = {
    r".*/resources/(requests|limits)/(cpu|memory)": QUANTITY,
    r".*/resources/(requests|limits)/nvidia\.com/gpu": r"\d+",
    r".*/emptyDir/sizeLimit": QUANTITY,
}
# What Kubeflow's models accept as any text: its path -> what it may be.
RULES = {
    "pytorchjob": PODS_RULES
    | {
        r"/apiVersion": r"kubeflow\.org/v1",
        r"/kind": r"PyTorchJob",
        r"/spec/nprocPerNode": r"auto|cpu|gpu|\d+",
        r"/spec/elasticPolicy/rdzvBackend": BACKENDS,
        r"/spec/runPolicy/cleanPodPolicy": r"All|Running|None",
        r"/spec/pytorchReplicaSpecs/(Master|Worker)/restartPolicy": RESTART_POLICIES,
    },
    "jobset": PODS_RULES | {r"/apiVersion": r"jobset\.x-k8s\.io/v1alpha2", r"/kind": r"JobSet"},
}
# Unknown keys of mappings of which the models accept any keys.
UNKNOWN_KEYS = re.compile(
    r"/spec/pytorchReplicaSpecs/(?!(Master|Worker)/)"
    r"|.*/resources/(requests|limits)/(?!(cpu|memory|nvidia\.com/gpu)$)"
)


def leaves(value, path=""):
    """Yield (path, value) of all that is no mapping and no list."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, f"{path}/{key}")
    else:
        yield path, value


def problems(name, manifest):
    messages = [f"{path} is unknown" for path, _ in leaves(manifest) if UNKNOWN_KEYS.match(path)]
    for path_pattern, pattern in RULES[name].items():
        matches = [(path, v) for path, v in leaves(manifest) if re.fullmatch(path_pattern, path)]
        if not matches:
            messages.append(f"nothing is at {path_pattern}")
        for path, value in matches:
            if not (isinstance(value, (str, int)) and re.fullmatch(pattern, str(value))):
                messages.append(f"{path} is {value}")
    return messages


@EACH
def test_versions_policies_and_quantities(name):
    assert problems(name, MANIFESTS[name]) == []


@pytest.mark.parametrize(
    "name, right, wrong, message",
    [
        (
            "pytorchjob",
            "apiVersion: kubeflow.org/v1",
            "apiVersion: kubeflow.org/v2",
            "/apiVersion is kubeflow.org/v2",
        ),
        ("pytorchjob", "apiVersion: kubeflow.org/v1", "", "nothing is at /apiVersion"),
        ("pytorchjob", "kind: PyTorchJob", "kind: PyTorchJobs", "/kind is PyTorchJobs"),
        ("pytorchjob", "    Worker:", "    Workers:", "/Workers/replicas is unknown"),
        (
            "pytorchjob",
            "restartPolicy: OnFailure",
            "restartPolicy: Sometimes",
            "/restartPolicy is Sometimes",
        ),
        (
            "pytorchjob",
            "cleanPodPolicy: Running",
            "cleanPodPolicy: Maybe",
            "/cleanPodPolicy is Maybe",
        ),
        (
            "pytorchjob",
            "cleanPodPolicy: Running",
            "cleanPodPolicy: null",
            "/cleanPodPolicy is None",
        ),
        ("pytorchjob", "rdzvBackend: c10d", "rdzvBackend: zoo", "/rdzvBackend is zoo"),
        ("pytorchjob", 'nprocPerNode: "8"', "nprocPerNode: all", "/nprocPerNode is all"),
        ("pytorchjob", "memory: 256Gi", "memory: lots", "/requests/memory is lots"),
        ("pytorchjob", "memory: 256Gi", "memory: 256GiB", "/requests/memory is 256GiB"),
        ("pytorchjob", 'cpu: "1"', 'cpu: "-1"', "/requests/cpu is -1"),
        (
            "jobset",
            "apiVersion: jobset.x-k8s.io/v1alpha2",
            "apiVersion: jobset.x-k8s.io/v9",
            "/apiVersion is jobset",
        ),
        ("jobset", "kind: JobSet", "kind: JobSets", "/kind is JobSets"),
        ("jobset", "memory: 256Gi", "memory: lots", "/requests/memory is lots"),
        ("jobset", "memory: 256Gi", "memroy: 256Gi", "/requests/memroy is unknown"),
        (
            "jobset",
            'nvidia.com/gpu: "8"',
            'nvidia.com/gpu: "0.5"',
            "/requests/nvidia.com/gpu is 0.5",
        ),
        ("jobset", "sizeLimit: 16Gi", "sizeLimit: 16 Gi", "/emptyDir/sizeLimit is 16 Gi"),
    ],
)
def test_a_wrong_manifest_is_refused(name, right, wrong, message):
    assert right in TEXTS[name]
    messages = problems(name, yaml.safe_load(TEXTS[name].replace(right, wrong, 1)))
    assert any(message in problem for problem in messages), messages


@EACH
def test_the_schema_knows_every_field(name):
    """Kubeflow's models, generated from the schemas, drop fields that they do not know."""
    pytest.importorskip("kubeflow_trainer_api")
    manifest = MANIFESTS[name]
    if name == "jobset":
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import (
            JobsetV1alpha2JobSet as JobSet,
        )

        assert JobSet.from_dict(manifest).to_dict() == manifest
        return
    from kubeflow.training import ApiClient
    from kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_template_spec import (
        IoK8sApiCoreV1PodTemplateSpec as Pod,
    )

    client = ApiClient()
    response = types.SimpleNamespace(data=json.dumps(manifest))
    job = client.deserialize(response, "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(job) == manifest
    assert Pod.from_dict(WORKERS["template"]).to_dict() == WORKERS["template"]


@pytest.mark.thorough
def test_the_workflow_runs(tmp_path):
    """Run the workflow as ``pyflyte run`` does, with two workers."""
    pytest.importorskip("flytekitplugins.kfpytorch")
    pyflyte = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
    arguments = [
        "run",
        "workflow.py",
        "compare_kernels",
        f"--out={tmp_path / 'out'}",
        "--steps=6",
        "--rows=64",
    ]
    env = environment(
        FLYTECTL_CONFIG=str(tmp_path / "none"), OMP_NUM_THREADS="1", WORKERS="2", HOME=str(tmp_path)
    )
    command = [sys.executable, "-c", pyflyte, *arguments]
    process = subprocess.run(command, cwd=CLUSTER, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    text = (tmp_path / "out" / "comparison.md").read_text()
    differ = re.search(r"Losses of (\d+) steps differ by ([\d.e-]+) at most", text)
    assert differ[1] == "6" and float(differ[2]) < 1e-4, text
    results = [
        json.loads(Path(tmp_path, "out", n, "result.json").read_text())
        for n in ("patched", "plain")
    ]
    assert [(r["workers"], r["patched"], r["steps"]) for r in results] == [
        (2, True, 6),
        (2, False, 6),
    ]
