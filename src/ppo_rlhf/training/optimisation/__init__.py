"""The update: PPO's losses over minibatches, optimiser steps, and what is measured of both."""
