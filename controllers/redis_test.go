package controllers

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker/redis"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
)

// redisServer is a server of its own, with a Broker for it that looks at everything once a second.
func (c *cluster) redisServer(name string, config ...string) (*goredis.Client, *v1alpha1.Broker) {
	c.t.Helper()
	srv := testenv.StartRedis(c.t, redisserver.Options{Config: append(config, "requirepass "+secretPassword)})
	b := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Name: name}}
	b.Spec.Redis = &v1alpha1.RedisBroker{Addresses: []v1alpha1.HostPort{v1alpha1.HostPort(srv.Addr())}}
	b.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: name + "-admin"}}
	b.Spec.ResyncInterval = &metav1.Duration{Duration: time.Second}
	c.create(secret(name+"-admin", map[string]string{"username": "default", "password": secretPassword}), b)
	raw := goredis.NewClient(&goredis.Options{Addr: srv.Addr(), Password: secretPassword, Protocol: 2, DisableIdentity: true})
	c.t.Cleanup(func() { _ = raw.Close() })
	return raw, b
}

func keysOf(t testing.TB, raw *goredis.Client) []string {
	t.Helper()
	keys, err := raw.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(keys)
	return keys
}

// The whole life on a real server: declaring, counts, lag, drift, conflicts, warnings, deletion.
func TestRedis_Life(t *testing.T) {
	c := start(t, redis.Driver)
	raw, b := c.redisServer("redis")
	topo := orders("orders", "redis")
	topo.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	fillRedis(t, raw)
	c.create(topo)
	c.ready(topo)
	c.ready(b)
	if diff := cmp.Diff([]string{"{orders}", "{orders}#queues", "{orders}-dlq", "{orders}-hold-5s", "{shove}#server"}, keysOf(t, raw)); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if !strings.HasPrefix(b.Status.ServerID, "redis-") || b.Status.ServerVersion == "" {
		t.Errorf("server %q, version %q", b.Status.ServerID, b.Status.ServerVersion)
	}

	t.Run("counts", func(t *testing.T) {
		c := c.on(t)
		want := v1alpha1.MessageCounts{Ready: ptr(int64(3)), InFlight: ptr(int64(2)), Held: ptr(int64(1)), Dead: ptr(int64(1))}
		testenv.Eventually(t, time.Minute, func() error {
			c.get(topo)
			if topo.Status.Counts == nil {
				return errors.New("no counts")
			}
			if d := cmp.Diff(want, *topo.Status.Counts); d != "" {
				return fmt.Errorf("counts (-want +got):\n%s", d)
			}
			return nil
		})
	})
	t.Run("Case22_deleted_by_hand", func(t *testing.T) {
		c := c.on(t)
		if err := raw.Del(t.Context(), "{orders}-dlq").Err(); err != nil {
			t.Fatal(err)
		}
		if note := c.event(topo, EventDrifted); !strings.Contains(note, `stream "{orders}-dlq" was missing`) {
			t.Errorf("event: %s", note)
		}
		if err := raw.XGroupDestroy(t.Context(), "{orders}", "orders").Err(); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			groups, err := raw.XInfoGroups(t.Context(), "{orders}").Result()
			if err == nil && len(groups) != 1 {
				err = fmt.Errorf("the group is not back: %+v", groups)
			}
			return err
		})
		c.conditionIs(topo, v1alpha1.ConditionDrift, metav1.ConditionFalse, "")
	})
	t.Run("conflict", func(t *testing.T) {
		c := c.on(t)
		if err := raw.Set(t.Context(), "{taken}-hold-5s", "somebody else's", 0).Err(); err != nil {
			t.Fatal(err)
		}
		taken := orders("taken", "redis")
		c.create(taken)
		if message := c.stalled(taken, v1alpha1.ReasonImmutableField); !strings.Contains(message, `it has string, the manifest asks for sorted set`) {
			t.Errorf("message: %s", message)
		}
	})
	t.Run("noeviction", func(t *testing.T) {
		c := c.on(t)
		_, evicting := c.redisServer("evicting", "maxmemory-policy allkeys-lru")
		if found := c.conditionIs(evicting, v1alpha1.ConditionServerWarning, metav1.ConditionTrue, ""); !strings.Contains(found.Message, `maxmemory-policy is "allkeys-lru"`) {
			t.Errorf("message: %s", found.Message)
		}
		c.ready(evicting)
		if found := meta.FindStatusCondition(b.Status.Conditions, v1alpha1.ConditionServerWarning); found != nil {
			t.Errorf("the other one: %s", found.Message)
		}
	})
	t.Run("trimmed", func(t *testing.T) { // the consumer that found out left a note
		c := c.on(t)
		if err := raw.HSet(t.Context(), "{orders}#consumers:orders", "#lost", time.Now().UnixMilli()).Err(); err != nil {
			t.Fatal(err)
		}
		if found := c.conditionIs(topo, v1alpha1.ConditionMessagesAtRisk, metav1.ConditionTrue, ""); !strings.Contains(found.Message, "those messages are lost") {
			t.Errorf("message: %s", found.Message)
		}
	})
	t.Run("deletion", func(t *testing.T) {
		c := c.on(t)
		if err := c.client.Delete(t.Context(), topo); err != nil {
			t.Fatal(err)
		}
		if note := c.event(topo, EventQueuesDeleted); !strings.Contains(note, "messages in them") {
			t.Errorf("event: %s", note)
		}
		if diff := cmp.Diff([]string{"{shove}#server", "{taken}-hold-5s"}, keysOf(t, raw)); diff != "" {
			t.Errorf("keys left (-want +got):\n%s", diff)
		}
	})
}

// on is the cluster for a subtest.
func (c *cluster) on(t *testing.T) *cluster {
	sub := *c
	sub.t = t
	return &sub
}

// fillRedis puts messages everywhere and deletes an unread one, after which the server does not know the lag any more. The
// streams are adopted.
func fillRedis(t testing.TB, raw *goredis.Client) {
	t.Helper()
	var ids []string
	for i := range 6 {
		id, err := raw.XAdd(t.Context(), &goredis.XAddArgs{Stream: "{orders}", Values: []any{"payload", i}}).Result()
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	err := errors.Join(
		raw.XGroupCreate(t.Context(), "{orders}", "orders", "0").Err(),
		raw.XReadGroup(t.Context(), &goredis.XReadGroupArgs{Group: "orders", Consumer: "x", Streams: []string{"{orders}", ">"}, Count: 2}).Err(),
		raw.XDel(t.Context(), "{orders}", ids[4]).Err(),
		raw.ZAdd(t.Context(), "{orders}-hold-5s", goredis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: "held"}).Err(),
		raw.XAdd(t.Context(), &goredis.XAddArgs{Stream: "{orders}-dlq", Values: []any{"payload", "d"}}).Err())
	if err != nil {
		t.Fatal(err)
	}
}

// Handler timeouts of the groups on one stream are compared, with each other and with what consumers show.
func TestRedis_H10(t *testing.T) {
	c := start(t, redis.Driver)
	raw, _ := c.redisServer("redis")
	topo := orders("orders", "redis")
	quick, slow := group("quick", "orders", ""), group("slow", "orders", "")
	quick.Spec.HandlerTimeout, slow.Spec.HandlerTimeout = seconds(10), seconds(21)
	c.create(topo, quick, slow)
	c.ready(topo)
	differ := func(g *v1alpha1.ConsumerGroup, parts ...string) {
		t.Helper()
		found := c.conditionIs(g, v1alpha1.ConditionHandlerTimeoutsDiffer, metav1.ConditionTrue, "")
		for _, p := range parts {
			if !strings.Contains(found.Message, p) {
				t.Errorf("%s: the message lacks %q: %s", g.Name, p, found.Message)
			}
		}
		c.ready(g)
	}
	agree := func(g *v1alpha1.ConsumerGroup) {
		t.Helper()
		testenv.Eventually(t, patience, func() error {
			c.get(g)
			if cond := meta.FindStatusCondition(g.Status.Conditions, v1alpha1.ConditionHandlerTimeoutsDiffer); cond != nil {
				return fmt.Errorf("%s: %s", g.Name, cond.Message)
			}
			return nil
		})
		c.ready(g)
	}
	differ(quick, "10s here", "21s in", `"slow"`)
	differ(slow, "21s here", "10s in", `"quick"`)
	c.patch(slow, func() { slow.Spec.HandlerTimeout = seconds(20) })
	agree(quick)
	agree(slow)
	c.patch(quick, func() { quick.Spec.HandlerTimeout = seconds(0) })
	differ(quick, "off here")
	differ(slow, "off in")
	if err := c.client.Delete(t.Context(), quick); err != nil {
		t.Fatal(err)
	}
	agree(slow)

	// A consumer of somebody's own program, which no manifest knows.
	now := time.Now().UnixMilli()
	for name, ms := range map[string]int{"a": 1000, "b": 5000} {
		if err := raw.HSet(t.Context(), "{orders}#consumers:orders", name, fmt.Sprintf("%d %d %d", ms, 2*ms, now)).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if found := c.conditionIs(topo, v1alpha1.ConditionMessagesAtRisk, metav1.ConditionTrue, ""); !strings.Contains(found.Message, "1s and 5s") {
		t.Errorf("message: %s", found.Message)
	}
}
