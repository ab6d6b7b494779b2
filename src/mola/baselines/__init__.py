"""Other methods, to compare with: temperature scaling, SWAG, MIMO, Monte Carlo dropout. All are predictors, and mix."""
