// Whole decoder layers: norm, query, key and value, rotary positions, append, attention, output, norm, SwiGLU.
//
// The residual stream stays in panels from the first layer to the last. Only the step's own tokens are computed, not
// what it is padded to.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "product.h"
#include "team.h"
#include "transpose.h"
#include "vector.h"

namespace paged {

struct LayerSizes {
  int64_t hidden, intermediate, kv_heads, group, dim;

  int64_t attended() const { return kv_heads * group * dim; }
  int64_t packed() const { return kv_heads * (group + 2) * dim; }
};

struct LayerWeights {
  const float *attention_norm, *qkv, *output, *mlp_norm, *gate_up, *down;
};

// Floats of each buffer for a step of so many tokens.
struct Workspace {
  float *x, *y, *packed, *wide, *query, *attended, *cos, *sin;

  static int64_t Floats(const LayerSizes& sizes, int64_t tokens) { return Workspace(nullptr, sizes, tokens).size_; }

  Workspace(float* at, const LayerSizes& sizes, int64_t tokens) {
    const Panels panels{tokens};
    int64_t used = 0;
    const auto next = [&](int64_t features) {
      float* found = at ? at + used : nullptr;
      used += panels.floats(features);
      return found;
    };
    x = next(sizes.hidden);
    y = next(std::max(sizes.hidden, sizes.attended()));
    packed = next(sizes.packed());
    wide = next(sizes.intermediate);
    query = next(sizes.attended());
    attended = next(sizes.attended());
    cos = next(sizes.dim / 2);
    sin = next(sizes.dim / 2);
    size_ = used;
  }

 private:
  int64_t size_;
};

// (tokens, features) into one panel; lanes without a token hold zeros.
inline void Pack(const float* from, int64_t features, const Panels& panels, int64_t panel, float* to) {
  const int64_t width = panels.width(panel), live = panels.live(panel);
  from += panel * kPanel * features;
  for (int64_t first = 0; first < width; first += kLanes) {
    int64_t feature = 0;
    for (; feature + kLanes <= features; feature += kLanes) {
      Floats square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        square[i] = first + i < live ? Load(from + (first + i) * features + feature) : Floats{};
      }
      Transpose(square);
      for (int64_t i = 0; i < kLanes; ++i) Store(to + (feature + i) * width + first, square[i]);
    }
    for (; feature < features; ++feature) {
      for (int64_t i = first; i < first + kLanes; ++i) {
        to[feature * width + i] = i < live ? from[i * features + feature] : 0.0f;
      }
    }
  }
}

// One panel into (tokens, features).
inline void Unpack(const float* from, int64_t features, const Panels& panels, int64_t panel, float* to) {
  const int64_t width = panels.width(panel), live = panels.live(panel);
  to += panel * kPanel * features;
  for (int64_t first = 0; first < live; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, live - first);
    int64_t feature = 0;
    for (; feature + kLanes <= features; feature += kLanes) {
      Floats square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) square[i] = Load(from + (feature + i) * width + first);
      Transpose(square);
      for (int64_t i = 0; i < count; ++i) Store(to + (first + i) * features + feature, square[i]);
    }
    for (; feature < features; ++feature) {
      for (int64_t i = 0; i < count; ++i) to[(first + i) * features + feature] = from[feature * width + first + i];
    }
  }
}

inline void Norm(const float* x, const float* weight, int64_t features, float eps, int64_t width, float* y) {
  for (int64_t lane = 0; lane < width; lane += kLanes) {
    Floats sum = {};
    for (int64_t i = 0; i < features; ++i) {
      const Floats v = Load(x + i * width + lane);
      sum = Fma(v, v, sum);
    }
    const Floats factor = Rsqrt(sum / Splat(static_cast<float>(features)) + Splat(eps));
    for (int64_t i = 0; i < features; ++i) {
      Store(y + i * width + lane, Load(x + i * width + lane) * factor * Splat(weight[i]));
    }
  }
}

// x += weight · y, all panels.
inline void AddProduct(Team& team, const float* weight, int64_t outputs, int64_t inputs, const Panels& panels,
                       const float* y, float* x) {
  Product(team, outputs, inputs, panels, [&](int64_t row, int64_t rows, int64_t panel) {
    alignas(64) float out[kRows * kPanel];
    const int64_t width = panels.width(panel);
    Rows(weight + row * inputs, inputs, rows, y + panels.start(panel, inputs), width, out);
    float* into = x + panels.start(panel, outputs) + row * width;
    for (int64_t i = 0; i < rows * width; i += kLanes) Store(into + i, Load(into + i) + Load(out + i));
  });
}

struct LayerCall {
  LayerSizes sizes;
  float eps;
  Pool pool;
  float *keys, *values;  // of the pool, to be written
  StepRows rows;
  Options options;
  const int32_t* write_slots;
  const float *cos, *sin;
};

// Turns query and key heads of one panel and KV head, appends key and value, and lays out queries by token.
inline void RotateAppend(const LayerCall& call, const Workspace& work, const Panels& panels, int64_t panel,
                         int64_t kv_head) {
  const auto& s = call.sizes;
  const int64_t width = panels.width(panel), live = panels.live(panel), half = s.dim / 2;
  float* heads = work.packed + panels.start(panel, s.packed()) + kv_head * (s.group + 2) * s.dim * width;
  const float* cos = work.cos + panels.start(panel, half);
  const float* sin = work.sin + panels.start(panel, half);
  const int64_t first_slot = call.rows.page_base * call.pool.page_size;
  for (int64_t j = 0; j < s.group + 2; ++j) {
    float* head = heads + j * s.dim * width;
    if (j <= s.group) {
      float* other = head + half * width;
      for (int64_t i = 0; i < half * width; i += kLanes) {
        const Floats a = Load(head + i), b = Load(other + i), c = Load(cos + i), d = Load(sin + i);
        Store(head + i, Fma(a, c, -(b * d)));
        Store(other + i, Fma(b, c, a * d));
      }
    }
    for (int64_t first = 0; first < live; first += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, live - first);
      float* to[kLanes];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = panel * kPanel + first + i;
        if (j < s.group) {
          to[i] = work.query + token * s.attended() + (kv_head * s.group + j) * s.dim;
        } else if (call.write_slots[token] < 0) {
          to[i] = nullptr;
        } else {
          const int64_t slot = first_slot + call.write_slots[token];
          to[i] = (j == s.group ? call.keys : call.values) + (slot * s.kv_heads + kv_head) * s.dim;
        }
      }
      for (int64_t feature = 0; feature < s.dim; feature += kLanes) {
        Floats square[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) square[i] = Load(head + (feature + i) * width + first);
        Transpose(square);
        for (int64_t i = 0; i < count; ++i) {
          if (to[i]) Store(to[i] + feature, square[i]);
        }
      }
    }
  }
}

inline void Layer(Team& team, const LayerCall& call, const LayerWeights& weights, const std::vector<Item>& items,
                  const Panels& panels, const Workspace& work) {
  const auto& s = call.sizes;
  team.Run(panels.count(), [&](int64_t panel) {
    const int64_t at = panels.start(panel, s.hidden);
    Norm(work.x + at, weights.attention_norm, s.hidden, call.eps, panels.width(panel), work.y + at);
  });
  Product(team, s.packed(), s.hidden, panels, [&](int64_t row, int64_t rows, int64_t panel) {
    const int64_t width = panels.width(panel);
    Rows(weights.qkv + row * s.hidden, s.hidden, rows, work.y + panels.start(panel, s.hidden), width,
         work.packed + panels.start(panel, s.packed()) + row * width);
  });
  team.Run(panels.count() * s.kv_heads,
           [&](int64_t task) { RotateAppend(call, work, panels, task / s.kv_heads, task % s.kv_heads); });
  const int64_t width = s.group * s.dim;
  AttendAll(
      team, call.pool, call.rows, call.options, items, s.group,
      [&](int64_t token, int64_t kv_head, float* to) {
        std::copy_n(work.query + token * s.attended() + kv_head * width, width, to);
      },
      [&](int64_t token, int64_t kv_head, const float* outputs, int64_t, const float*) {
        std::copy_n(outputs, width, work.attended + token * s.attended() + kv_head * width);
      });
  team.Run(panels.count(), [&](int64_t panel) {
    Pack(work.attended, s.attended(), panels, panel, work.y + panels.start(panel, s.attended()));
  });
  AddProduct(team, weights.output, s.hidden, s.attended(), panels, work.y, work.x);
  team.Run(panels.count(), [&](int64_t panel) {
    const int64_t at = panels.start(panel, s.hidden);
    Norm(work.x + at, weights.mlp_norm, s.hidden, call.eps, panels.width(panel), work.y + at);
  });
  Product(team, s.intermediate, s.hidden, panels, [&](int64_t row, int64_t rows, int64_t panel) {
    alignas(64) float gate[kRows * kPanel], up[kRows * kPanel];
    const int64_t width = panels.width(panel);
    const float* y = work.y + panels.start(panel, s.hidden);
    Rows(weights.gate_up + row * s.hidden, s.hidden, rows, y, width, gate);
    Rows(weights.gate_up + (s.intermediate + row) * s.hidden, s.hidden, rows, y, width, up);
    float* into = work.wide + panels.start(panel, s.intermediate) + row * width;
    for (int64_t i = 0; i < rows * width; i += kLanes) {
      const Floats g = Load(gate + i);
      Store(into + i, g / (Splat(1.0f) + Exp(-g)) * Load(up + i));
    }
  });
  AddProduct(team, weights.down, s.hidden, s.intermediate, panels, work.wide, work.x);
}

// Logits of n tokens: norm, then the vocabulary's product, into (n, vocabulary).
inline void Vocabulary(Team& team, const float* x, int64_t tokens, const float* norm, float eps, const float* head,
                       int64_t hidden, int64_t vocabulary, float* work, float* logits) {
  const Panels panels{tokens};
  float* y = work + panels.floats(hidden);
  team.Run(panels.count(), [&](int64_t panel) {
    const int64_t at = panels.start(panel, hidden);
    Pack(x, hidden, panels, panel, work + at);
    Norm(work + at, norm, hidden, eps, panels.width(panel), y + at);
  });
  Product(team, vocabulary, hidden, panels, [&](int64_t row, int64_t rows, int64_t panel) {
    alignas(64) float out[kRows * kPanel];
    const int64_t width = panels.width(panel);
    Rows(head + row * hidden, hidden, rows, y + panels.start(panel, hidden), width, out);
    for (int64_t token = 0; token < panels.live(panel); ++token) {
      float* into = logits + (panel * kPanel + token) * vocabulary + row;
      for (int64_t r = 0; r < rows; ++r) into[r] = out[r * width + token];
    }
  });
}

}  // namespace paged
