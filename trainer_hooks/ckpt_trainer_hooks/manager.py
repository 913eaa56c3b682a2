"""CheckpointManager: the four lines in a training loop."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from ckpt.errors import CkptError, InvalidInputError
from ckpt.events import event, get_logger
from ckpt.flusher.embedded import start_embedded_server
from ckpt.format.ids import CheckpointId, split_run_url
from ckpt.format.keys import run_key
from ckpt.rpc.access import PeerAccess
from ckpt.storage.known_nodes import known_nodes, remember_nodes
from ckpt.storage.staging import StagingDir, default_staging_path
from ckpt.storage.standard_fds import fill_standard_fds
from ckpt_trainer_hooks.accumulation import Accumulation, AccumulationPolicy
from ckpt_trainer_hooks.agree import Agreement
from ckpt_trainer_hooks.fence import OptimizerFence
from ckpt_trainer_hooks.flusher_process import python_path
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.ladder import Ladder
from ckpt_trainer_hooks.layout import LayoutBuilder
from ckpt_trainer_hooks.lineage import Lineage
from ckpt_trainer_hooks.loop import LoopMethods
from ckpt_trainer_hooks.nodes import check_peer_listen
from ckpt_trainer_hooks.options import (
    audit_interval,
    check_choice,
    merged_items,
    run_config,
    with_replication,
)
from ckpt_trainer_hooks.pipeline import SavePipeline
from ckpt_trainer_hooks.policy import EveryNSteps, SaveDecisionPolicy
from ckpt_trainer_hooks.redistribute import Redistribute, check_hooks
from ckpt_trainer_hooks.restore import Restorer
from ckpt_trainer_hooks.saving import Saver
from ckpt_trainer_hooks.selection import Rename, RestoreOptions
from ckpt_trainer_hooks.selftest import selftest_wanted
from ckpt_trainer_hooks.session import Session, agree_on_session, claim
from ckpt_trainer_hooks.several import named_items
from ckpt_trainer_hooks.state import TrainState
from ckpt_trainer_hooks.stop_options import StopOptions
from ckpt_trainer_hooks.waiting import wait_for_saves, wait_until_sealed
from ckpt_trainer_hooks.watch import Watch

__all__ = ["CheckpointManager"]

_log = get_logger("manager")


class CheckpointManager(LoopMethods):
    """Saves and restores the state of a training run.

    Every rank makes one, with the same arguments. A save copies this rank's share of the state into shared
    memory and returns; a child process seals it on local NVMe, and the node's staging server uploads and
    commits it. No save uses a collective or waits for disk, network, another rank or the server. (FSDP1's own
    state-dict API does: there all ranks have to enter the constructor, restores and saves together.)

    Args:
        url: of the run, whose last component is its name: ``s3://bucket/llama-8b``, or a path.
        model: a module, wrapped or not (DDP, FSDP2, FSDP1, TP, compile); or the chunks of a model that this
            rank has (interleaved pipeline stages) as a list, each with the names of the whole model.
        optimizer: over the model's parameters. Several as a list or mapping (Muon and AdamW): they become the
            items ``optimizer_0``, ``optimizer_1``, ... or ``optimizer_<key>``.
        lr_scheduler: anything with state_dict and load_state_dict; several likewise.
        dataloader: the same; its state is kept per rank.
        state: more items by name: modules, optimizers, stateful objects, or mutable mappings of plain values
            (restored in place).
        per_rank: items whose state differs from rank to rank.
        redistribute: for a restore of per-rank items onto another number of ranks, which is refused without:
            ``{"dataloader": fn}``, where ``fn(states, rank, world_size)`` gets the states of all saved ranks,
            in their order, and returns the one to load on this rank.
        accumulation: what a save between two microbatches does. "boundary" (default) puts it off until the
            optimizer has stepped; "discard" saves the state of the last boundary, so that a restore runs the
            microbatches again (costs a walk over the state, and a copy of buffers, per step); "capture" saves
            the accumulated gradients too, and a restore goes on with the next microbatch. See
            :meth:`microbatch`.
        rng_stream: number of this rank's random-number streams. Ranks that must draw alike (tensor-parallel
            ones, say) have one number; it counts where streams are made anew, after a change of the number
            of ranks. Default: the rank.
        save_interval_steps: :meth:`step` saves when the number of completed steps is a multiple; 0 never.
        save_decision_policy: instead of the interval.
        keep_last: newest checkpoints kept in the store; None keeps all.
        keep_every: also keep steps divisible by this.
        keep_local: newest committed steps kept on NVMe for fast restarts.
        compression: of what is uploaded: "auto" (where the server measures that it pays), "on" or "off";
            default: as the server is set, which is auto. Exact in any case.
        replication_factor: copies of every sealed segment on NVMe, the node's own included; 2 keeps one on
            another node, in another failure domain where there is one. 1 (default): none. Needs servers that
            listen for one another; see docs/replication.md.
        replication_jump: distance of the copies in nodes; default: as the failure domains demand.
        replication_rate: bytes per second that a node's server sends to others, in all; None: no limit.
        mode: "overlapped" copies parameters and optimizer state while the next forward and backward
            run; "blocking" copies all before it returns; "auto" is overlapped where there is an optimizer.
        on_busy: what a save does while the one before is still being written to NVMe: "wait", "skip",
            "fail".
        on_error: whether failures of background work "raise" at the next call, or "warn" in the log.
        audit_every: compare replicas of parameters and optimizer state (on CPUs) in the first save and in
            every so-many-th after it; a difference keeps the step from being committed and names tensor and
            ranks. 0: never. Default 100 where the copy is overlapped, else 0: it costs a pass over the state.
        selftest: read every sealed part back and compare it with digests taken from the live state; a
            difference is an error that names the tensor. For what it costs see ckpt_trainer_hooks.selftest.
            Default: whether $CKPT_SELFTEST is 1.
        staging_dir: on NVMe, shared by the ranks of a node; default $CKPT_STAGING or ~/.cache/ckpt/staging.
        server: gRPC target of a staging daemon (``unix:/path`` or ``host:port``); default ``$CKPT_SERVER``,
            else one is started on this node and leaves when its uploads are done.
        store_options: of the object store (``endpoint_url``, ``region``, ...); credentials come from the
            environment, never from here.
        stop_signals: signals that ask all ranks to save and stop at a common step; see docs/liveness.md.
            Default: ``$CKPT_STOP_SIGNALS``, else SIGTERM and SIGUSR1; ``()`` leaves signals alone.
        notice_file: path whose appearance asks for the same; default ``$CKPT_NOTICE_FILE``.
        grace_s: from such a request to the end of the process; default ``$CKPT_STOP_GRACE_S``, else 25.
        on_stop: "exit" raises StopTraining, a SystemExit, from :meth:`step` after that save; "flag" only
            makes :attr:`should_stop` true.
        timeout_s: how long restore waits for other ranks, and the end of a ``with`` block for its commits.
        pending_wait_s: how long restore waits for the commit of a step that is whole on NVMe, where the nodes
            cannot read it from one another (see docs/recovery.md), and for own saves to be sealed.
        share_reads: in a restore, one rank reads what several want of the object store and sends it to the
            others over the process group. False on any rank: each reads what it needs.

    Raises:
        InvalidInputError: an argument is wrong; nothing was written.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer
        | Sequence[torch.optim.Optimizer]
        | Mapping[str, torch.optim.Optimizer]
        | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        state: Mapping[str, Any] | None = None,
        per_rank: Collection[str] = ("dataloader",),
        redistribute: Mapping[str, Redistribute] | None = None,
        rng_stream: int | None = None,
        accumulation: AccumulationPolicy = "boundary",
        save_interval_steps: int = 0,
        save_decision_policy: SaveDecisionPolicy | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_local: int = 2,
        compression: Literal["auto", "on", "off"] | None = None,
        replication_factor: int = 1,
        replication_jump: int | None = None,
        replication_rate: float | None = None,
        mode: Literal["auto", "overlapped", "blocking"] = "auto",
        on_busy: Literal["wait", "skip", "fail"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        audit_every: int | None = None,
        selftest: bool | None = None,
        staging_dir: str | os.PathLike[str] | None = None,
        server: str | None = None,
        store_options: Mapping[str, str] | None = None,
        stop_signals: Collection[str] | None = None,
        notice_file: str | os.PathLike[str] | None = None,
        grace_s: float | None = None,
        on_stop: Literal["exit", "flag"] = "exit",
        timeout_s: float = 600.0,
        pending_wait_s: float = 60.0,
        share_reads: bool = True,
    ) -> None:
        check_choice("mode", mode, ("auto", "overlapped", "blocking"))
        check_choice("on_busy", on_busy, ("wait", "skip", "fail"))
        check_choice("on_error", on_error, ("raise", "warn"))
        self._config = with_replication(
            run_config(os.fspath(url), store_options, keep_last, keep_every, keep_local, compression),
            replication_factor,
            replication_jump,
            replication_rate,
        )
        stop = StopOptions.of(signals=stop_signals, notice_file=notice_file, grace_s=grace_s, on_stop=on_stop)
        self.run = split_run_url(self._config.url)[1]
        self._agreement = Agreement(timeout_s)
        rank = self._agreement.rank
        builder = LayoutBuilder(rank, self._agreement.world_size)
        self._accumulation = Accumulation(accumulation)
        items = {
            "model": model,
            **named_items("optimizer", optimizer),
            **named_items("lr_scheduler", lr_scheduler),
            "dataloader": dataloader,
            **self._accumulation.items,
        }
        self._state = TrainState(
            merged_items(items, state or {}), builder, rank=rank, per_rank=per_rank, rng_stream=rng_stream
        )
        self._redistribute = dict(redistribute or {})
        check_hooks(self._redistribute, self._state)
        self._policy = save_decision_policy or EveryNSteps(save_interval_steps)
        overlapped = mode == "overlapped" or (mode == "auto" and bool(self._state.optimizers))
        if overlapped and not self._state.optimizers:
            raise InvalidInputError("overlapped mode needs a registered optimizer: its step is the fence")
        self._on_error = on_error
        self._lineage = Lineage(
            self.run,
            rank=rank,
            world_size=self._agreement.world_size,
            audit_every=audit_interval(audit_every, overlapped=overlapped),
        )
        self._pending_wait_s, self._timeout_s = pending_wait_s, timeout_s
        fill_standard_fds()
        self._staging = StagingDir(staging_dir or default_staging_path()).ensure()
        self._share_reads = share_reads
        self._server = server or os.environ.get("CKPT_SERVER")
        if replication_factor > 1 and self._server is None:
            check_peer_listen(os.environ)
        self._session: Session | None = None
        self._closed = False
        self._owner = os.getpid()
        self._watch = Watch(self._config.url, self._agreement, self._staging, stop)
        self._pipeline = SavePipeline(
            self._state,
            rank=rank,
            staging=self._staging.path,
            run_key=run_key(self._config.url),
            server=self._server or self._staging.socket_target(),
            starts_server=self._server is None,
            selftest=selftest_wanted(selftest),
            pulse=self._watch.pulse,
            replicates=replication_factor > 1,
        )
        self._fence = OptimizerFence(self._state.stepping_optimizers, self._pipeline, self._watch.pulse)
        self._saver = Saver(
            state=self._state,
            pipeline=self._pipeline,
            lineage=self._lineage,
            accumulation=self._accumulation,
            fence=self._fence,
            overlapped=overlapped,
            on_busy=on_busy,
        )
        self._accumulation_hooks = self._accumulation.watch(self._state.stepping_optimizers)
        atexit.register(self.close)

    # --- the loop ---

    def restore(
        self,
        step: int | str = "latest",
        *,
        include: str | Collection[str] | None = None,
        exclude: str | Collection[str] = (),
        weights_only: bool = False,
        rename: Rename | None = None,
        strict: bool = True,
        allow_missing: bool | None = None,
        allow_unexpected: bool | None = None,
        cast_dtypes: bool = False,
        start_over: bool = False,
        required: bool = False,
    ) -> int:
        """Restore the run and return the next iteration: 0 for a fresh run.

        Collective in effect: every rank must call it. Rank 0 chooses the checkpoint for all. Afterwards this
        start of the run has an attempt number of its own.

        Args:
            step: "latest", a number of completed steps, or an id such as "000000012000.a000003".
            include, exclude: patterns of names, such as ``model.encoder.*``: what to take, and what not; see
                :mod:`ckpt_trainer_hooks.selection`. What is left out stays untouched.
            weights_only: take only modules; optimizers, schedulers, loaders and random numbers stay.
            rename: ``{"model.old.*": "model.new.*"}``, or a function from saved names of modules' tensors to
                live ones; optimizer state follows its parameters.
            strict: refuse where the checkpoint has more or less than the live state; ``allow_missing`` and
                ``allow_unexpected`` decide each of the two alone.
            cast_dtypes: convert modules' tensors to the live dtype, which is refused otherwise.
            start_over: begin a new lineage at 0 beside the checkpoints that exist; restores nothing. Where
                the run was deleted in the store, what nodes hold of it is set aside.
            required: to find nothing is an error: for a job that is to go on, where 0 would mean that the URL
                is wrong.

        Returns:
            The number of completed optimizer steps of what was restored, which is the next iteration to run.

        Raises:
            NotFoundError: the step asked for does not exist, or nothing does and it is ``required``.
            RefusedError: the checkpoint is another run's (code "other-run"), or nodes hold steps of a run
                that the store knows nothing of ("run-gone"). Nothing was changed.
            UnavailableError: the store cannot be reached; nothing is known, and nothing was begun.
            InvalidInputError: the checkpoint does not fit the live state (all differences are listed); ranks
                were given different URLs; or the state of a rank could not be saved.
            CorruptError: no good copy is left. Bytes go straight into the live tensors, so parts of what was
                found damaged may be in them: do not train on.
            TimeoutExceededError: a rank did not take part.
            StopTraining: code 93, where ``$CKPT_MAX_NO_PROGRESS`` starts have resumed here and saved nothing.
        """
        self._check_open()
        chosen = RestoreOptions.of(
            include=include,
            exclude=exclude,
            weights_only=weights_only,
            rename=rename,
            strict=strict,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            cast_dtypes=cast_dtypes,
        )
        self._raise_background_errors()
        self._watch.restore_begins()
        self._pipeline.wait_until_captured()
        wait_until_sealed(self._pipeline.pending(), self._pending_wait_s)
        session = self._begin_session()
        self._watch.session_known(session)
        self._accumulation.before_restore()
        found: CheckpointId | None = None
        is_committed = False
        if not start_over:
            restorer = Restorer(
                url=self._config.url,
                options=self._config.store_options,
                chosen=chosen,
                state=self._state,
                agreement=self._agreement,
                ladder=self._ladder(),
                pending_wait_s=self._pending_wait_s,
                redistribute=self._redistribute,
                timer=self._watch.timer,
                share_reads=self._share_reads,
                required=required,
            )
            found, is_committed = restorer.restore(str(step)), restorer.restored_commit
        self._watch.timer.enter("reshard")
        self._accumulation.after_restore(self._state.modules)
        self._watch.check_progress(self._config, found)
        claimed = claim(
            self._agreement,
            self._config,
            found,
            parent_is_committed=is_committed,
            staging=self._staging,
            hosts_server=session.hosts_server,
        )
        self._lineage.begin(claimed.attempt, found, claimed.run_id)
        self._fence.restart()
        self._pipeline.retake_wanted = False  # of a state that is no more
        with self._agreement.together("prepare"):
            self._pipeline.prepare()
        self._saver.remember_boundary()
        self._watch.restore_ended(session, claimed.attempt, found)
        return 0 if found is None else found.step

    def step(self, iteration: int) -> SaveHandle | None:
        """Tell that iteration ``iteration`` (counted from 0) is finished, so that ``iteration + 1`` optimizer
        steps are complete; saves when due. Returns the save's handle, or None when none was due.

        Raises:
            CkptError: background work has failed since the last call and ``on_error`` is "raise".
            StopTraining: a stop was asked for (a signal, a notice file) and this is the step that all ranks
                agreed on, saved as its ``reason`` says. A SystemExit with the exit code for the launcher.
        """
        self._check_open()
        self._raise_background_errors()
        completed = iteration + 1
        self._accumulation.stepped()
        stops = self._watch.step_completed(completed)
        handle = None
        if self._pipeline.retake_wanted or self._accumulation.has_deferred or self.should_save(completed):
            handle = self._accumulation.settled(self._save(completed))
        self._saver.remember_boundary()
        if stops:
            self._save_and_stop(handle)
        self._watch.step_over()
        return handle

    def save(self, step: int) -> SaveHandle:
        """Save now, as the state after ``step`` completed optimizer steps.

        Inside a loop over ``iteration``, after the optimizer's step, that is ``iteration + 1``; :meth:`step`
        does that arithmetic. Saving before the first step (``save(0)``) does not change training.

        Between two microbatches (see :meth:`microbatch`) ``step`` is the number of completed steps all the
        same; what is saved then depends on ``accumulation``.

        Returns:
            A handle with ``staging_completion``, ``local_completion`` and ``upload_completion``.

        Raises:
            InvalidInputError: something in the state cannot be stored, or :meth:`restore` was never called;
                nothing was written.
            RefusedError: ``step`` is not above the last one saved.
            BusyError: the save before is still being written and ``on_busy`` is "fail".
            CkptError: background work has failed since the last call and ``on_error`` is "raise".
        """
        self._raise_background_errors()
        return self._accumulation.settled(self._save(step))

    # --- the end ---

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Block until every save of this rank is committed or has failed, and raise what failed.

        A commit needs every rank's part, so this can wait for other ranks; a training loop need not call it.

        Raises:
            TimeoutExceededError: some saves are still under way after ``timeout_s``.
            SnapshotTornError: the last snapshot was torn and no save took its place.
            CkptError: a save failed.
        """
        self._pipeline.wait_until_captured()
        self._wait_for_pending_saves(timeout_s)
        self._saver.check_all_saved()

    def close(self) -> None:
        """Finish the running copy and hand over. Idempotent; waits for no disk or network.

        What was copied is sealed, uploaded and committed by the flusher and the staging server after this
        process has gone; :meth:`wait_until_finished` before waits for that.
        """
        if self._closed or os.getpid() != self._owner:  # a forked child must leave everything alone
            return
        self._closed = True
        atexit.unregister(self.close)
        self._fence.remove()
        self._accumulation.give_up("the manager was closed")
        for hook in self._accumulation_hooks:
            hook.remove()
        self._watch.close()
        self._pipeline.close()
        with contextlib.suppress(CkptError):  # else its server stays until this process ends; no harm
            self._staging.forget_trainer(os.getpid())
        for error in self._pipeline.take_problems():
            event(_log, logging.ERROR, "manager.unreported_error", error=error)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            with contextlib.ExitStack() as stack:
                stack.callback(self.close)
                self.wait_until_finished(self._timeout_s)
                self._note_end()
        else:
            self.close()

    # --- inside ---

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("the manager is closed", code="closed")

    def _save(self, step: int, *, on_busy: str | None = None) -> SaveHandle:
        self._check_open()
        group = self._session.group if self._session is not None else None
        with self._watch.pulse.phase("save"):
            handle = self._saver.save(step, group, on_busy=on_busy)
        if not handle.skipped:
            self._watch.saved(handle)
        return handle

    def _save_and_stop(self, handle: SaveHandle | None) -> None:
        """Save for a stop that was asked for, unless this very step was saved already, and end."""
        done = handle or self._watch.save_for_stop()
        if done is None or done.skipped:
            done = self._accumulation.settled(self._save(self._watch.completed, on_busy="wait"))
        self._watch.finish(done)

    def _begin_session(self) -> Session:
        if self._session is None:
            self._known_nodes = known_nodes(self._staging, run_key(self._config.url))
            self._session = agree_on_session(
                self._agreement,
                self._config,
                self._staging,
                self._state.names_digest(),
                self._state.per_rank,
                start_server=self._start_server,
            )
            self._state.builder.replicate_over(self._session.peers)
        return self._session

    def _ladder(self) -> Ladder:
        assert self._session is not None
        if self._session.hosts_server:
            remember_nodes(
                self._staging, run_key(self._config.url), (*self._session.nodes, *self._known_nodes)
            )
        return Ladder(
            self._agreement,
            self._staging,
            run_key(self._config.url),
            nodes=self._session.nodes,
            known=self._known_nodes,
            is_host=self._session.hosts_server,
            access=PeerAccess.from_environment(),
        )

    def _note_end(self) -> None:
        """Everything is committed and nobody will come back: the servers need not stay for other nodes."""
        session = self._session
        if session is not None and session.hosts_server and self._config.replication_factor > 1:
            self._staging.mark_ended(run_key(self._config.url))

    def _start_server(self) -> None:
        if self._server is None:
            start_embedded_server(
                self._staging, trainer_pid=os.getpid(), environment={**os.environ, **python_path()}
            )

    def _wait_for_pending_saves(self, timeout_s: float | None = None) -> None:
        if self._session is not None:  # else there was no save
            wait_for_saves(self._pipeline.pending, self._config, self._staging, self._session, timeout_s)

    def _raise_background_errors(self) -> None:
        problems = self._pipeline.take_problems()
        if problems and self._on_error == "raise":
            raise problems[0]
        for error in problems:
            event(_log, logging.ERROR, "save.background_error", error=error)
