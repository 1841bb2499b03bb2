"""Experiments: one module per verb of the command line, named like the verb.

======================  ==========================================================================
:mod:`.learn`           Learn to which transformations images are invariant, and how far.
:mod:`.compare`         Compare several methods on several transformations, in one table.
:mod:`.profile`         Show whether a learnt range is a maximum of the evidence, and how flat.
:mod:`.suggest`         Suggest augmentations for a network that was trained without any.
:mod:`.layers`          Learn layer by layer which symmetry a network should have.
:mod:`.measure`         Measure how invariant networks are, in and out of distribution.
:mod:`.pairs`           Learn a code that ignores unknown transformations, from pairs.
:mod:`.variational`     Learn ranges by a lower bound on the evidence of a shallow network.
:mod:`.plane`           Learn whether labels of points ignore rotations, and draw predictions.
:mod:`.reproduce`       Repeat a table of a paper.
:mod:`.demo`            Run a small demonstration.
======================  ==========================================================================

Each module has a configuration, a function and a result of that name: ``LearnConfig``, ``learn``
and ``LearnResult``::

    from laplace_invariance.experiments.learn import LearnConfig, learn

    print(learn(LearnConfig(data="digits", transform="fully_rotated"), out="run"))

Every function takes the configuration, a directory ``out`` for its results (None keeps nothing),
``resume`` and ``progress_bar``. It raises FileExistsError if the directory has a run already and
``resume`` is False, ValueError if that run is of another configuration, and BlockingIOError if
another process uses the directory. The directory has ``experiment.json`` (the configuration) and
``summary.json`` (the result); those of single runs also ``history.jsonl`` and ``checkpoint.pt``.

:mod:`.options` defines all configurations without importing torch, and :mod:`.base` what the
experiments share: the run directory, the seed, the data, the training recipe.
"""
