"""Analyses of trained runs: experiments that ask why a method works.

They look at models, statistics, gradients and answers, and leave a run as it is; some take a few steps of local training and throw them
away. ``polyfed.analyse`` and ``polyfed analyse`` do all of them for run folders; the functions here take an experiment
(``result.experiment``) and give numbers.
"""

from polyfed.analysis.analyse import Analyses as Analyses
from polyfed.analysis.confidence import confidence as confidence
from polyfed.analysis.feature_similarity import feature_similarity as feature_similarity
from polyfed.analysis.gradient_bias import gradient_bias as gradient_bias
from polyfed.analysis.gradient_bias import gradient_bias_of as gradient_bias_of
from polyfed.analysis.kinds import KINDS as KINDS
from polyfed.analysis.layer_spread import layer_spread as layer_spread
from polyfed.analysis.local_models import states_after_training as states_after_training
from polyfed.analysis.local_models import states_as_tested as states_as_tested
from polyfed.analysis.norm_statistics import norm_statistics as norm_statistics
from polyfed.analysis.rounds import noted as noted
from polyfed.analysis.rounds import statistics_drift as statistics_drift
from polyfed.analysis.score_grid import score_grid as score_grid
from polyfed.analysis.tsne import tsne as tsne
from polyfed.analysis.union_statistics import score_with as score_with
from polyfed.analysis.union_statistics import union_statistics as union_statistics
