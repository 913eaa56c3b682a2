"""Another run's checkpoint, another model's, a wrong prefix, an empty store, one out of reach: five answers.

None of them is ever "begin from scratch" over something that exists, or the continuation of something else.
On a directory and on a real S3 server.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import CkptError, InvalidInputError, NotFoundError, RefusedError, UnavailableError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops import catalog
from ckpt.ops.attempts import newest_attempt, read_run_id
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.cli import FAILED, NOT_FOUND, OTHER_RUN, Cli
from tests.support.models import build, full_state, train
from tests.support.runs import stop_server
from tests.support.s3 import free_port

WAIT_S = 60.0
STEP = CheckpointId(2, 1)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(slots=True)
class Site:
    """A root with the runs ``llama-8b`` and ``mistral`` (steps 1 and 2 each), and an empty one.

    Attributes:
        states: of each run at step 2.
    """

    kind: str
    root: str
    empty: str
    staging: Path
    env: dict[str, str]
    states: dict[str, dict[str, torch.Tensor]]

    def manager(self, url: str, *, seed: int = 9, **more: Any) -> CheckpointManager:
        model, optimizer = build("single", 1, seed=seed)
        return CheckpointManager(url, model=model, optimizer=optimizer, staging_dir=self.staging, **more)

    def store(self, name: str) -> Store:
        return open_store(f"{self.root}/{name}")

    def copy(self, source: str, target: str, *prefixes: str) -> str:
        """Copy objects of a run by hand; all of them where no prefix is given. Returns the target's URL."""
        with closing(self.store(source)) as there, closing(self.store(target)) as here:
            for prefix in prefixes or ("",):
                for info in there.list_keys(prefix):
                    here.put(info.key, there.get(info.key))
        return f"{self.root}/{target}"

    def cli(self, folder: Path) -> Cli:
        found = Cli(folder / "cli-staging")
        found.env |= self.env
        return found


def state_of(manager: CheckpointManager) -> dict[str, torch.Tensor]:
    items = manager._state.items
    return full_state(items["model"], items["optimizer"])


def restores(site: Site, url: str, **how: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Restore into fresh objects; the step, and what they hold then."""
    with site.manager(url) as manager:
        return manager.restore(**how), state_of(manager)


def refused(site: Site, url: str, kind: type[CkptError], code: str, **how: Any) -> dict[str, Any]:
    """Restore into fresh objects, which must fail so and change nothing; the error's context."""
    options = how.pop("store_options", None)
    with site.manager(url, store_options=options) as manager:
        before = state_of(manager)
        with pytest.raises(kind) as caught:
            manager.restore(**how)
        assert type(caught.value) is kind
        assert caught.value.code == code, caught.value
        assert manager.attempt is None
        assert_same_bits(state_of(manager), before)
    return caught.value.context


@pytest.fixture(scope="module", params=["file", "s3"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    root, empty, env = f"file://{folder}/store", f"file://{folder}/nothing/here", {}
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        root, empty, env = f"s3://{server.make_bucket()}/runs", f"s3://{server.make_bucket()}/a", server.env
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        found = Site(request.param, root, empty, folder / "staging", dict(env), {})
        for seed, name in enumerate(("llama-8b", "mistral")):
            model, optimizer = build("single", 1, seed=seed)
            with CheckpointManager(
                f"{root}/{name}", model=model, optimizer=optimizer, staging_dir=found.staging
            ) as manager:
                assert manager.restore() == 0
                for step in (1, 2):
                    list(train(model, optimizer, range(step - 1, step)))
                    manager.save(step).upload_completion.result(WAIT_S)
            found.states[name] = full_state(model, optimizer)
        yield found
        stop_server(found.staging)


CHECKPOINT = ("manifests/", "index/", "data/", "layouts/")


def test_another_runs_checkpoint_is_named_and_not_continued(site: Site, tmp_path: Path) -> None:
    """I14: objects of one run were put below another's URL, under ids that it has itself."""
    cli = site.cli(tmp_path)
    url = f"{site.root}/mistral-copy"
    site.copy("mistral", "mistral-copy", "attempts/")
    site.copy("llama-8b", "mistral-copy", *CHECKPOINT)
    context = refused(site, url, RefusedError, "other-run")
    assert (context["saved_by_run"], context["checkpoint"]) == ("llama-8b", str(STEP))
    assert context["saved_run_id"] != context["run_id"]

    shown = cli.json("show", url, code=OTHER_RUN)
    assert (shown["run"], shown["foreign"]["code"]) == ("llama-8b", "other-run")
    if site.kind == "s3":
        return
    verified = cli.json("verify", url, code=OTHER_RUN)["checkpoints"][0]
    assert [problem["code"] for problem in verified["problems"]] == ["other-run"]
    assert [row["other_run"] for row in cli.json("list", url)["checkpoints"]] == [True, True]


def test_one_checkpoint_copied_to_another_name_is_another_runs(site: Site) -> None:
    url = site.copy("llama-8b", "finetune", *CHECKPOINT)
    assert refused(site, url, RefusedError, "other-run")["saved_by_run"] == "llama-8b"


def test_a_run_that_was_copied_as_a_whole_goes_on_under_its_new_name(site: Site, tmp_path: Path) -> None:
    url = site.copy("llama-8b", "llama-moved")
    with site.manager(url) as manager:
        assert manager.restore() == 2
        assert_same_bits(state_of(manager), site.states["llama-8b"])
        manager.save(3).upload_completion.result(WAIT_S)
    with closing(site.store("llama-moved")) as store, closing(site.store("llama-8b")) as source:
        assert read_run_id(store) == read_run_id(source)
    assert restores(site, url)[0] == 3
    assert site.cli(tmp_path).json("show", url)["foreign"] is None


def test_another_models_checkpoint_lists_what_differs(site: Site) -> None:
    model, optimizer = build("single", 1)
    model.up, model.extra = nn.Linear(10, 30), nn.Linear(2, 2)
    before = full_state(model, optimizer)
    with CheckpointManager(
        f"{site.root}/llama-8b", model=model, optimizer=optimizer, staging_dir=site.staging
    ) as manager:
        with pytest.raises(InvalidInputError) as caught:
            manager.restore()
        assert caught.value.code == "mismatch"
        assert "model.extra.weight" in str(caught.value.context["missing"])
        assert "model.up.weight" in str(caught.value.context["shapes"])
        assert manager.attempt is None
        assert_same_bits(full_state(model, optimizer), before)


def test_a_wrong_prefix_names_the_runs_that_are_near(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli, wrong = site.cli(tmp_path), f"{site.root}/LLaMA-8b"
    context = refused(site, wrong, NotFoundError, "no-run", required=True)
    assert str(context["similar_runs"]) == "['llama-8b']"
    refused(site, wrong, NotFoundError, "no-run", step=2)
    above = refused(site, site.root, NotFoundError, "no-run", required=True)
    assert "llama-8b" in str(above["runs_below"])
    for command in ("list", "verify") if site.kind == "file" else ():
        error = cli.json(command, wrong, code=NOT_FOUND)["error"]
        assert (error["code"], error["context"]["similar_runs"]) == ("no-run", "['llama-8b']"), command

    assert restores(site, f"{site.root}/llama-8c")[0] == 0  # a new run, said to be one
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "restore.from_scratch"]
    assert record.levelno == logging.WARNING
    assert record.fields["similar_runs"] == ["llama-8b"]  # type: ignore[attr-defined]


def test_an_empty_store_is_a_fresh_start_unless_a_checkpoint_is_required(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    url, cli = f"{site.empty}/run", site.cli(tmp_path)
    refused(site, url, NotFoundError, "empty-store", required=True)
    if site.kind == "file":
        assert cli.json("show", url, code=NOT_FOUND)["error"]["code"] == "empty-store"
    assert restores(site, url)[0] == 0
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "restore.from_scratch"]
    assert record.levelno == logging.INFO
    refused(site, url, NotFoundError, "no-checkpoint", required=True)  # begun, and nothing saved


def test_an_unreachable_store_is_an_error(site: Site, tmp_path: Path) -> None:
    """I06: not a fresh start."""
    url, options = f"{site.root}/llama-8b", {}
    if site.kind == "s3":
        options = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "retries": "0"}
    else:  # a mount that does not answer
        (tmp_path / "loop").symlink_to("loop")
        url = f"file://{tmp_path}/loop/llama-8b"
    refused(site, url, UnavailableError, "unreachable" if options else "unavailable", store_options=options)
    arguments = [f"--option={key}={value}" for key, value in options.items()]
    error = site.cli(tmp_path).json("show", url, *arguments, code=FAILED)["error"]
    assert error["kind"] == "UnavailableError"


def test_lost_manifests_are_put_again_and_lost_attempts_do_no_harm(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """I06: on the one run all manifests are gone, on the other all attempt records."""
    url = site.copy("llama-8b", "llama-lost", "attempts/", "index/", "data/", "layouts/")
    found, state = restores(site, url)
    assert found == 2
    assert_same_bits(state, site.states["llama-8b"])
    said = [r.fields["checkpoint"] for r in caplog.records if getattr(r, "event", "") == "commit.found"]  # type: ignore[attr-defined]
    assert said == [STEP, CheckpointId(1, 1)]

    with closing(site.store("mistral")) as store:
        records = {info.key: store.get(info.key) for info in store.list_keys("attempts/")}
        run_id = read_run_id(store)
        store.delete(records)
        try:
            assert restores(site, f"{site.root}/mistral")[0] == 2
            assert newest_attempt(store) == 2
            assert read_run_id(store) == run_id
        finally:
            for key, record in records.items():
                store.put(key, record)


def test_segments_of_another_run_in_the_staging_directory_are_not_read(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """I14: the folder of one run was put in the place of another's."""
    url = site.copy("mistral", "mistral-swapped")
    staging = StagingDir(site.staging)
    mine, theirs = staging.run_dir(keys.run_key(url)), staging.run_dir(keys.run_key(f"{site.root}/llama-8b"))
    shutil.rmtree(mine, ignore_errors=True)
    shutil.copytree(theirs, mine, ignore=shutil.ignore_patterns("run.json", "recovery", "lives", "spare"))
    found, state = restores(site, url)
    assert found == 2
    assert_same_bits(state, site.states["mistral"])
    assert {getattr(r, "event", "") for r in caplog.records} >= {"restore.other_life", "staging.set_aside"}
    (aside,) = (site.staging / "aside" / keys.run_key(url)).iterdir()
    assert (aside / str(STEP) / keys.local_index_name(0)).is_file()
    with closing(site.store("mistral-swapped")) as store:
        assert [info.ident.step for info in catalog.list_checkpoints(store)] == [2, 1]
