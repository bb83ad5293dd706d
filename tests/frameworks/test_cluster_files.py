"""examples/cluster: what its manifests, scripts and workflow say, and that their kinds take it."""

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
    (found,) = PODS[name]["spec"]["containers"]
    return found


def values(name):
    return {variable["name"]: variable["value"] for variable in container(name)["env"]}


@EACH
def test_a_pod_has_time_to_save(name):
    seconds = int(re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", TORCHRUN)[1])
    assert PODS[name]["spec"]["terminationGracePeriodSeconds"] > seconds > 30


@EACH
def test_the_probe_reads_what_the_program_writes(name):
    given = dict(argument.removeprefix("--").split("=") for argument in container(name)["args"])
    probe = container(name)["livenessProbe"]
    command = probe["exec"]["command"][-1]
    assert command.count(given["heartbeat"]) == 2
    minutes = int(re.search(r"-mmin -(\d+)", command)[1])
    assert 60 * minutes > int(
        given["collective-timeout"]
    )  # torchrun starts hung workers again before the probe fails
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
    done = subprocess.run([*shell, command.replace("/tmp/heartbeat", str(heartbeat))])
    assert (done.returncode == 0) == alive


@EACH
def test_a_pod_has_shared_memory_gpus_and_no_rights(name):
    spec, its = PODS[name]["spec"], container(name)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in its["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/out"]
    assert set(mounts) >= {
        "/" + a.split("=/")[1].split("/")[0] for a in its["args"] if "=/" in a
    } - {"/tmp"}
    for one in (its, *spec["initContainers"]):
        assert one["securityContext"] == dict(
            allowPrivilegeEscalation=False, capabilities=dict(drop=["ALL"])
        )
        assert one["resources"]["requests"]["memory"] == one["resources"]["limits"]["memory"]
    assert (
        its["resources"]["requests"]["nvidia.com/gpu"]
        == its["resources"]["limits"]["nvidia.com/gpu"]
        == "8"
    )
    assert spec["securityContext"]["runAsNonRoot"]


@EACH
def test_nccl_has_no_path_forbidden(name):
    names = {variable for variable in values(name) if variable.startswith(("NCCL", "GLOO"))}
    assert names == {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert values(name)["NCCL_SOCKET_IFNAME"] == "=" + values(name)["GLOO_SOCKET_IFNAME"]


def test_the_image_is_the_dockerfiles():
    text = (CLUSTER / "Dockerfile").read_text()
    (image,) = re.findall(r"docker build .*-t (\S+) ", text)
    for spec in (pod["spec"] for pod in PODS.values()):
        assert {one["image"] for one in (*spec["containers"], *spec["initContainers"])} == {image}
        assert spec["securityContext"]["runAsUser"] == int(
            re.search(r"^USER (\d+)$", text, re.M)[1]
        )
        assert spec["containers"][0]["command"] == ["./torchrun.sh"]
    assert f'"{image}"' in (CLUSTER / "workflow.py").read_text()
    folder = re.search(r"^WORKDIR (\S+)$", text, re.M)[1]
    assert f"COPY examples/cluster {folder}\n" in text and f'CMD ["{folder}/torchrun.sh"]' in text
    assert os.access(CLUSTER / "torchrun.sh", os.X_OK)


def test_numbers_of_pods_and_processes_agree():
    job, spec = MANIFESTS["pytorchjob"], MANIFESTS["pytorchjob"]["spec"]
    assert (
        WORKERS["replicas"]
        == spec["elasticPolicy"]["maxReplicas"]
        == spec["elasticPolicy"]["minReplicas"]
    )
    assert (
        container("pytorchjob")["name"] == "pytorch"
        and job["spec"]["runPolicy"]["backoffLimit"] > 0
    )
    assert WORKERS["restartPolicy"] == "OnFailure"
    assert spec["nprocPerNode"] == container("pytorchjob")["resources"]["limits"]["nvidia.com/gpu"]
    given = values("jobset")
    assert re.fullmatch(BACKENDS, given["PET_RDZV_BACKEND"])
    assert str(JOB["parallelism"]) == str(JOB["completions"]) == given["PET_NNODES"]
    assert (
        given["PET_NPROC_PER_NODE"] == container("jobset")["resources"]["limits"]["nvidia.com/gpu"]
    )
    name = MANIFESTS["jobset"]["metadata"]["name"]
    port = container("jobset")["ports"][0]["containerPort"]
    assert (
        given["PET_RDZV_ENDPOINT"]
        == f"{name}-{MANIFESTS['jobset']['spec']['replicatedJobs'][0]['name']}-0-0.{name}:{port}"
    )
    assert (
        JOB["template"]["spec"]["restartPolicy"] == "Never" and JOB["completionMode"] == "Indexed"
    )


def told(tmp_path, script, *arguments, status=0, **variables):
    """What ``torchrun`` was called with, of which there is a stand-in, and what else was called."""
    stand_ins = dict(
        torchrun=f'env | grep -E "^(PET|TORCH|NCCL|GLOO)_" > env; echo "$@" > torchrun; exit {status}',
        srun='shift; exec "$@"',
        scontrol='case $1 in show) echo one; echo two;; *) echo "$@" >> scontrol;; esac',
    )
    for name, text in stand_ins.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(
            f"#!/bin/sh\ncd {tmp_path}\n{text}\n" if name != "srun" else f"#!/bin/sh\n{text}\n"
        )
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCH_", "SLURM_"))
    } | {"PATH": path}
    done = subprocess.run(
        ["bash", CLUSTER / script, *arguments], env=env | variables, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    called = (tmp_path / "scontrol").read_text() if (tmp_path / "scontrol").exists() else ""
    given = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    return (tmp_path / "torchrun").read_text().split(), given, called


def test_torchrun_on_one_machine(tmp_path):
    arguments, given, _ = told(tmp_path, "torchrun.sh", "--steps", "3")
    assert arguments == ["--standalone", str(CLUSTER / "train.py"), "--steps", "3"]
    assert given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and given["PET_NPROC_PER_NODE"] in (
        "2",
        "gpu",
    )
    arguments, given, _ = told(
        tmp_path, "torchrun.sh", PET_RDZV_ENDPOINT="one:1", PET_NPROC_PER_NODE="8"
    )
    assert arguments == [str(CLUSTER / "train.py")] and given["PET_NPROC_PER_NODE"] == "8"


@pytest.mark.parametrize(
    "finished, restarts, requeued", [(False, "1", True), (True, "1", False), (False, "20", False)]
)
def test_slurm(finished, restarts, requeued, tmp_path):
    job = dict(
        SLURM_SUBMIT_DIR=str(CLUSTER), SLURM_JOB_NODELIST="x", SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="4",
        SLURM_JOB_ID="777", SLURM_RESTART_COUNT=restarts, INTERFACE="ib0",
    )  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    if finished:
        (out / "result.json").touch()
    arguments, given, called = told(
        tmp_path, "slurm.sbatch", "--steps=3", "--out", str(out), status=1, **job
    )
    assert arguments == [str(CLUSTER / "train.py"), "--steps=3", "--out", str(out)]
    assert (given["PET_NNODES"], given["PET_NPROC_PER_NODE"], given["PET_RDZV_ENDPOINT"]) == (
        "2",
        "4",
        "one:20777",
    )
    assert given["NCCL_SOCKET_IFNAME"] == "=ib0" and given["GLOO_SOCKET_IFNAME"] == "ib0"
    seconds = int(
        re.search(r"^#SBATCH --signal=TERM@(\d+)$", (CLUSTER / "slurm.sbatch").read_text(), re.M)[1]
    )
    assert int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < seconds
    assert called == ("requeue 777\n" if requeued else "")


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
PODS_RULES = {
    r".*/resources/(requests|limits)/(cpu|memory)": QUANTITY,
    r".*/resources/(requests|limits)/nvidia\.com/gpu": r"\d+",
    r".*/emptyDir/sizeLimit": QUANTITY,
}
RULES = {  # what Kubeflow's models take as any text: where it stands -> what it may be
    "pytorchjob": PODS_RULES
    | {
        r"/apiVersion": r"kubeflow\.org/v1",
        r"/kind": r"PyTorchJob",
        r"/spec/nprocPerNode": r"auto|cpu|gpu|\d+",
        r"/spec/elasticPolicy/rdzvBackend": BACKENDS,
        r"/spec/runPolicy/cleanPodPolicy": r"All|Running|None",
        r"/spec/pytorchReplicaSpecs/(Master|Worker)/restartPolicy": r"Always|OnFailure|Never|ExitCode",
    },
    "jobset": PODS_RULES | {r"/apiVersion": r"jobset\.x-k8s\.io/v1alpha2", r"/kind": r"JobSet"},
}
# those of a mapping whose keys the models take as they come: no other may be there
NAMES = re.compile(
    r"/spec/pytorchReplicaSpecs/(?!(Master|Worker)/)|.*/resources/(requests|limits)/(?!(cpu|memory|nvidia\.com/gpu)$)"
)


def leaves(value, path=""):
    """(where it stands, what stands there)"""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path}/{key}")
    else:
        yield path, value


def problems(name, manifest):
    found = [f"{path} is unknown" for path, _ in leaves(manifest) if NAMES.match(path)]
    for where, what in RULES[name].items():
        there = [(path, value) for path, value in leaves(manifest) if re.fullmatch(where, path)]
        found += [] if there else [f"nothing is at {where}"]
        found += [
            f"{path} is {value}"
            for path, value in there
            if not (isinstance(value, (str, int)) and re.fullmatch(what, str(value)))
        ]
    return found


@EACH
def test_versions_policies_and_quantities(name):
    assert problems(name, MANIFESTS[name]) == []


@pytest.mark.parametrize(
    "name, right, wrong, said",
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
def test_a_wrong_manifest_is_refused(name, right, wrong, said):
    assert right in TEXTS[name]
    found = problems(name, yaml.safe_load(TEXTS[name].replace(right, wrong, 1)))
    assert any(said in problem for problem in found), found


@EACH
def test_the_schema_knows_every_field(name):
    """Models that Kubeflow generates from the schemas: what they do not know is gone from what they
    give back."""
    pytest.importorskip("kubeflow_trainer_api")
    given = MANIFESTS[name]
    if name == "jobset":
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import (
            JobsetV1alpha2JobSet as JobSet,
        )

        assert JobSet.from_dict(given).to_dict() == given
        return
    from kubeflow.training import ApiClient
    from kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_template_spec import (
        IoK8sApiCoreV1PodTemplateSpec as Pod,
    )

    client = ApiClient()
    read = client.deserialize(
        types.SimpleNamespace(data=json.dumps(given)), "KubeflowOrgV1PyTorchJob"
    )
    assert client.sanitize_for_serialization(read) == given
    assert Pod.from_dict(WORKERS["template"]).to_dict() == WORKERS["template"]


@pytest.mark.thorough
def test_the_workflow_runs(tmp_path):
    """As ``pyflyte run`` does it, with two workers."""
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
    done = subprocess.run(command, cwd=CLUSTER, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
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
