"""Processes that tests start: forked where that is safe, since an import of torch takes seconds."""

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback

import numpy as np
import torch

# threads of an accelerator do not survive a fork, nor do those of system libraries elsewhere
FORKS = sys.platform == "linux" and not torch.accelerator.is_available()
METHOD = "fork" if FORKS else "spawn"


def start(function, *arguments, log, method=METHOD):
    """Call a function in a process of its own, with all that it prints in a file."""
    context = multiprocessing.get_context(method)
    process = context.Process(target=_run, args=(function, arguments, log))
    process.start()
    return process


def forget(*packages):
    """Let packages be imported anew, in a process that does nothing else."""
    for name in list(sys.modules):
        if name.split(".")[0] in packages:
            del sys.modules[name]


def _run(function, arguments, log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
    logging.getLogger().handlers.clear()  # those of pytest
    torch.set_num_threads(1)  # a fork has one thread
    torch.set_default_dtype(torch.float64)
    for seed in (torch.seed, random.seed, np.random.seed):
        seed()  # the states of a fork would be those of the test
    function(*arguments)


class Forked:
    """A process as ``subprocess.Popen`` starts it with pipes, but of a function.

    Args:
        function: What to call, instead of a program.
        env: Variables of the process.
        stderr: File of what it says.
    """

    def __init__(self, function, env, stderr):
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._call(function, env, (their_input, their_output, stderr.fileno()))
        os.close(their_input)
        os.close(their_output)
        self.stdin, self.stdout = os.fdopen(our_input, "wb"), os.fdopen(our_output, "rb")
        self.returncode = None

    @staticmethod
    def _call(function, env, streams):
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # also the pipes of its siblings
        os.environ.update(env)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        code = 1
        try:
            function()
            code = 0
        except SystemExit as end:
            code = int(end.code)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=60):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.01)
        return self.returncode

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
